package nft

import (
	"fmt"
	"slices"

	"github.com/google/nftables"
)

// shapes describe everything of a table but elements and the values of counters, one item per
// object.
func (d definition) shapes() []string {
	var out []string
	for _, name := range d.counters {
		out = append(out, counterShape(name))
	}
	for _, s := range d.sets {
		out = append(out, s.shape())
	}
	for _, c := range d.chains {
		out = append(out, chainShape(c.nft(nil)))
		for i, r := range c.rules {
			out = append(out, ruleShape(c.Name, i, r.comment))
		}
	}
	slices.Sort(out)
	return out
}

func ruleShape(chain string, i int, comment string) string {
	return fmt.Sprintf("rule %s %03d %s", chain, i, comment)
}

func counterShape(name string) string { return "counter " + name }

func (o object) shape() string {
	if o.kind != nftables.ObjTypeCounter {
		return fmt.Sprintf("object %s of type %d", o.Name, o.kind)
	}
	return counterShape(o.Name)
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
