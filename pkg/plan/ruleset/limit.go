package ruleset

import (
	"fmt"
	"time"

	"github.com/coil-net/coil/pkg/dataplane"
)

// The kernel counts connections by a list for each client, and looks up all that the list has when one
// is added (nf_conncount_add): with thousands of them each new one would cost milliseconds. So only one
// in several new connections, drawn at random, is in the list, and stands for the others.
const (
	// mostCounted is how many connections a list may have: one deviates by a sixteenth from
	// what it stands for, seldom by more than three.
	mostCounted = 256
	// FullFor is for how long a client is held to have too many connections after it was
	// refused the last one, unless one that is drawn finds fewer.
	FullFor = time.Hour
	// refusedFor is for how long all connections are refused without a look: lists grow by each
	// look, and shrink by a few entries.
	refusedFor = 100 * time.Millisecond
)

// sample returns how many connections of a client are counted at most, each of which stands for
// so many.
func sample(most int) (counted, each uint32) {
	each = uint32((most + mostCounted - 1) / mostCounted)
	return uint32(most) / each, each
}

// FullSets are the names of the sets of clients that were refused a connection within FullFor.
func FullSets() []string {
	var names []string
	for _, f := range families {
		names = append(names, f.Named(fullSet))
	}
	return names
}

const fullSet = "full"

// limit returns the chain for packets that open a connection of a client, who may have so many of them at once, and
// adds its sets, with room for so many clients. Samples can be told from the others by a client that tries for long
// enough: those that are over the limit by a count of all are refused anyway.
//
//	over                          full, dropped
//	refused a moment ago          dropped
//	not drawn, and not full       accepted
//	counted, and too many         full, dropped
//	counted                       not full any more, accepted
//
// Of a client that is full each connection is counted: the first that is accepted was drawn in place
// of one that has ended.
func (t *gateway) limit(f family, size uint32) dataplane.Chain {
	c := dataplane.Chain{Name: f.Named("opens")}
	if most := t.MaxPerClient; most > 0 {
		connections, each := sample(most)
		byRules := func(name string, timeout time.Duration) dataplane.Set {
			return dataplane.Set{Name: f.Named(name), Key: f.addr, Size: size, Counting: timeout == 0, Timeout: timeout}
		}
		// The limit is in each element: another one needs another set.
		counted := byRules(fmt.Sprintf("counted_%d", connections), 0)
		t.Sets = append(t.Sets, counted, byRules(fullSet, FullFor), byRules("refused", refusedFor), f.set("over", t.Over))
		dropped := fmt.Sprintf("counter name %s_$f drop", ConnectionLimit)
		f.rule(&c, "over the limit", "$ip saddr @over_$f update @full_$f { $ip saddr } %s", dropped)
		f.rule(&c, "refused a moment ago", "$ip saddr @refused_$f %s", dropped)
		if each > 1 {
			f.rule(&c, "not drawn", "numgen random mod %d != 0 $ip saddr != @full_$f counter name %s_$f accept", each, Masqueraded)
		}
		f.rule(&c, "too many connections", "add @%s { $ip saddr ct count over %d } update @full_$f { $ip saddr } update @refused_$f { $ip saddr } %s", counted.Name, connections, dropped)
		f.rule(&c, "fewer connections", "$ip saddr @full_$f delete @full_$f { $ip saddr }")
	}
	f.rule(&c, "from a client", "counter name %s_$f accept", Masqueraded)
	return c
}
