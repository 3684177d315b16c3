package nft_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/testkit"
)

// Objects that a program in a pod adds to the table go, of whatever kind they are.
func TestForeignObjectsGo(t *testing.T) {
	l := newClientLab(t)
	testkit.Must(l.table.Sync(t.Context(), l.rules))(t)
	for _, foreign := range []string{
		"limit inet coil past_tunnel_ipv4 { rate 1/second; }", "quota inet coil mine { over 1 mbytes; }",
		"map inet coil mine { type ipv4_addr : ipv4_addr; }", "set inet coil mine { type ipv4_addr . inet_service; comment \"mine\"; }",
		"chain inet coil mine { comment \"mine\"; }", "rule inet coil entry counter comment \"mine\"",
	} {
		l.run(l.client, "nft", "add "+foreign)
		if err := l.table.Check(t.Context(), l.rules); err == nil || !strings.Contains(err.Error(), "shouldn't be there") {
			t.Errorf("%s: CHECK says %v", foreign, err)
		}
		result, err := l.table.Sync(t.Context(), l.rules)
		if err != nil || result.Replaced != 1 {
			t.Errorf("%s: Sync did %+v, %v", foreign, result, err)
		}
		testkit.Check(t, l.table.Check(t.Context(), l.rules))
		if out := l.run(l.client, "nft", "list", "table", "inet", "coil"); strings.Contains(out, "mine") || strings.Contains(out, "limit ") {
			t.Errorf("%s is left:\n%s", foreign, out)
		}
	}
}

// A program in a pod makes as many chains as it likes; they cost the agent no more than the first few thousand.
func TestChainsOfAPodAreBounded(t *testing.T) {
	l := newClientLab(t)
	testkit.Must(l.table.Sync(t.Context(), l.rules))(t)
	var script strings.Builder
	for i := range 5000 {
		fmt.Fprintf(&script, "add chain inet coil foreign%d\n", i)
	}
	path := filepath.Join(t.TempDir(), "script")
	testkit.Check(t, os.WriteFile(path, []byte(script.String()), 0o600))
	l.run(l.client, "nft", "-f", path)
	if _, err := l.table.Sync(t.Context(), l.rules); !errors.Is(err, rtnl.ErrTooMany) {
		t.Errorf("Sync says %v", err)
	}
}

// A program in a pod makes as many elements as it likes; the agent doesn't keep them all in memory.
func TestElementsOfAPodAreBounded(t *testing.T) {
	l := newClientLab(t)
	testkit.Must(l.table.Sync(t.Context(), l.rules))(t)
	var script strings.Builder
	for _, set := range []string{"peers_ipv4 { 10.%d.%d.%d", "peers_ipv6 { fd00::%x:%x:%x"} {
		fmt.Fprintf(&script, "add element inet coil "+set, 7, 0, 0)
		element := set[strings.Index(set, "{ ")+2:]
		for i := range 60_000 {
			fmt.Fprintf(&script, ", "+element, 8, i>>8, i&0xff)
		}
		script.WriteString(" }\n")
	}
	path := filepath.Join(t.TempDir(), "script")
	testkit.Check(t, os.WriteFile(path, []byte(script.String()), 0o600))
	l.run(l.client, "nft", "-f", path)
	if err := l.table.Check(t.Context(), l.rules); !errors.Is(err, rtnl.ErrTooMany) {
		t.Errorf("CHECK says %v", err)
	}
	if _, err := l.table.Sync(t.Context(), l.rules); !errors.Is(err, rtnl.ErrTooMany) {
		t.Errorf("Sync says %v", err)
	}
}
