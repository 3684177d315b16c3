package nft

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
)

// shape describes everything of a table but elements and the values of counters, one item per
// object.
func (d definition) shape() ([]string, error) {
	var out []string
	for _, name := range d.counters {
		out = append(out, counterShape(name))
	}
	for _, s := range d.sets {
		out = append(out, s.shape())
	}
	for _, c := range d.chains {
		out = append(out, chainShape(c.nft()))
		for i, r := range c.rules {
			mark, err := r.mark()
			if err != nil {
				return nil, err
			}
			out = append(out, fmt.Sprintf("rule %s %03d %s", c.name, i, mark))
		}
	}
	slices.Sort(out)
	return out, nil
}

func counterShape(name string) string { return "counter " + name }

func (s set) shape() string { return setShape(s.name, s.key, s.interval, s.size) }

func setShape(name string, key nftables.SetDatatype, interval bool, size uint32) string {
	return fmt.Sprintf("set %s: %#x %t %d", name, key.GetNFTMagic(), interval, size)
}

func chainShape(c *nftables.Chain) string {
	switch {
	case c.Hooknum == nil || c.Priority == nil:
		return "chain " + c.Name
	case c.Policy == nil || *c.Policy != nftables.ChainPolicyAccept:
		return "chain " + c.Name + " of another policy"
	}
	return fmt.Sprintf("chain %s: %s %d %d", c.Name, c.Type, *c.Hooknum, *c.Priority)
}

// objects are a table's named objects.
type objects struct {
	counters []*nftables.CounterObj
	sets     []*nftables.Set
	chains   []*nftables.Chain
}

// readObjects reads the objects of the table, which exists.
func readObjects(conn *nftables.Conn) (objects, error) {
	var o objects
	var err error
	if o.counters, err = readCounters(conn); err != nil {
		return o, err
	}
	if o.sets, err = conn.GetSets(named()); err != nil {
		return o, err
	}
	o.chains, err = conn.ListChainsOfTableFamily(family)
	o.chains = slices.DeleteFunc(o.chains, func(c *nftables.Chain) bool { return c.Table.Name != dataplane.NftTable })
	return o, err
}

// shape reads from the kernel what definition.shape describes; it is empty if there is no table.
func (t *table) shape(ctx context.Context, conn *nftables.Conn) ([]string, error) {
	if _, err := conn.ListTableOfFamily(dataplane.NftTable, family); err != nil {
		if errors.Is(err, unix.ENOENT) {
			return nil, nil
		}
		return nil, err
	}
	o, err := readObjects(conn)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, c := range o.counters {
		out = append(out, counterShape(c.Name))
	}
	for _, s := range o.sets {
		out = append(out, setShape(s.Name, s.KeyType, s.Interval, s.Size))
	}
	for _, c := range o.chains {
		out = append(out, chainShape(c))
	}
	rules, err := t.rules(ctx)
	if err != nil {
		return nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(rules)) {
		for i, mark := range rules[name] {
			out = append(out, fmt.Sprintf("rule %s %03d %s", name, i, mark))
		}
	}
	slices.Sort(out)
	return out, nil
}
