package flows

import (
	"context"
	"fmt"
	"net/netip"
	"regexp"
	"strings"

	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// Guard counts, where the server is, what must not be there: segments that reset connections, and packets to its port that come from others than
// the sources that are allowed.
type Guard struct{ ns *netlab.NS }

const guardTable = "inet flows-guard"

// NewGuard makes one in the server's network namespace, in place of one that there was. Sources of a family may be none.
func NewGuard(ctx context.Context, ns *netlab.NS, port uint16, allowed ...netip.Addr) (*Guard, error) {
	sources := map[string][]string{"ip": {"192.0.2.0"}, "ip6": {"100::"}} // a set needs an element
	for _, a := range allowed {
		family := "ip6"
		if a.Is4() {
			family = "ip"
		}
		sources[family] = append(sources[family], a.String())
	}
	commands := []string{"add table " + guardTable, "delete table " + guardTable, "add table " + guardTable, "add counter " + guardTable + " resets"}
	for _, hook := range []string{"prerouting", "output"} {
		commands = append(commands, fmt.Sprintf("add chain %s %s { type filter hook %[2]s priority -400; }", guardTable, hook),
			fmt.Sprintf("add rule %s %s tcp flags rst counter name resets", guardTable, hook))
	}
	for family, list := range sources {
		commands = append(commands, fmt.Sprintf("add set %s others-%s { typeof %[2]s saddr; size 4096; flags dynamic; }", guardTable, family),
			fmt.Sprintf("add rule %s prerouting tcp dport %d %s saddr != { %s } add @others-%[3]s { %[3]s saddr }", guardTable, port, family, strings.Join(list, ", ")))
	}
	_, err := ns.Run(ctx, "nft", strings.Join(commands, "; "))
	return &Guard{ns}, err
}

var (
	resets = regexp.MustCompile(`packets (\d+)`)
	others = regexp.MustCompile(`elements = \{([^}]*)\}`)
)

// Check returns an error if there was something.
func (g *Guard) Check(ctx context.Context) error {
	out, err := g.ns.Run(ctx, "nft", "list table "+guardTable)
	if err != nil {
		return err
	}
	count := resets.FindStringSubmatch(out)
	if count == nil {
		return fmt.Errorf("there is no counter in %s", out)
	}
	var wrongs []string
	if count[1] != "0" {
		wrongs = append(wrongs, count[1]+" resets")
	}
	for _, m := range others.FindAllStringSubmatch(out, -1) {
		wrongs = append(wrongs, "packets from "+strings.Join(strings.Fields(m[1]), " "))
	}
	if len(wrongs) > 0 {
		return fmt.Errorf("where the server is there were %s", strings.Join(wrongs, ", and "))
	}
	return nil
}
