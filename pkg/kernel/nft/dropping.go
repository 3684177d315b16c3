package nft

import (
	"fmt"
	"slices"

	"github.com/google/nftables"
)

// familyNames are those of families of tables whose chains meet packets of IP.
var familyNames = map[nftables.TableFamily]string{
	nftables.TableFamilyIPv4: "ip", nftables.TableFamilyIPv6: "ip6", nftables.TableFamilyINet: "inet",
}

// Dropping returns the base chains of all tables that drop forwarded packets unless a rule accepts them: "FAMILY TABLE CHAIN" as in nft(8).
// Those of iptables that aren't kept by nftables (iptables-legacy) aren't among them.
func (t *Table) Dropping() ([]string, error) {
	conn, err := t.connect()
	if err != nil {
		return nil, fmt.Errorf("open nftables: %w", err)
	}
	chains, err := conn.ListChains()
	if err != nil {
		return nil, fmt.Errorf("list chains: %w", err)
	}
	var all []string
	for _, c := range chains {
		family, ofIP := familyNames[c.Table.Family]
		if ofIP && c.Hooknum != nil && *c.Hooknum == *nftables.ChainHookForward && c.Policy != nil && *c.Policy == nftables.ChainPolicyDrop {
			all = append(all, fmt.Sprintf("%s %s %s", family, c.Table.Name, c.Name))
		}
	}
	slices.Sort(all)
	return all, nil
}
