package plan

import (
	"fmt"
	"strings"
)

// maxNamed is how many objects a message names before it only counts.
const maxNamed = 3

// Enumerate names the first few and counts the rest.
func Enumerate(names []string) string {
	if len(names) <= maxNamed {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:maxNamed], ", "), len(names)-maxNamed)
}

// Count is the number n with its noun and verb.
func Count(n int, singular, plural string) string {
	if n == 1 {
		return "1 " + singular
	}
	return fmt.Sprintf("%d %s", n, plural)
}
