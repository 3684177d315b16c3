package plan

// TrueFirst orders true before false, in the manner of cmp.Compare.
func TrueFirst(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}
