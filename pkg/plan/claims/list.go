package claims

import (
	"fmt"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
)

// Problem is why a claim hasn't got an address, in the words of its condition.
type Problem struct{ Reason, Message string }

func problemf(reason, format string, args ...any) Problem {
	return Problem{reason, fmt.Sprintf(format, args...)}
}

// Indexes returns the blocks of a pool that an AddressClaim lists, in the order of the list, each once. Entries that can't be
// had are told.
func Indexes(list []string, pool ipam.Pool) ([]int32, []Problem) {
	var indexes []int32
	var problems []Problem
	listed := map[int32]bool{}
	for _, entry := range list {
		r, err := ipam.ParseRange(entry)
		if err != nil {
			problems = append(problems, problemf(v2.ReasonAddressInvalid, "%s: %v", entry, err))
			continue
		}
		for a, n := r.First, 0; a.IsValid() && a.Compare(r.Last) <= 0; a, n = a.Next(), n+1 {
			if n == v2.MaxClaimedAddresses {
				problems = append(problems, problemf(v2.ReasonAddressInvalid, "%s has more than %d addresses", entry, v2.MaxClaimedAddresses))
				break
			}
			index, ok := pool.Containing(a)
			if !ok {
				problems = append(problems, problemf(v2.ReasonAddressOutsidePool, "%s isn't an address of the pool", a))
				break // the rest of the entry may be as wrong, and long
			}
			if listed[index] {
				continue
			}
			if len(indexes) == v2.MaxClaimedAddresses {
				return indexes, append(problems, problemf(v2.ReasonAddressInvalid, "there are more than %d addresses: those from %s on are left out", v2.MaxClaimedAddresses, a))
			}
			listed[index] = true
			indexes = append(indexes, index)
		}
	}
	return indexes, problems
}
