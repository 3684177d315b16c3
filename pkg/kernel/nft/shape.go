package nft

import (
	"fmt"
	"slices"

	"github.com/google/nftables"
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

func (o object) shape() string {
	if o.kind != nftables.ObjTypeCounter {
		return fmt.Sprintf("object %s of type %d", o.name, o.kind)
	}
	return counterShape(o.name)
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
