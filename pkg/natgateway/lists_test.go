package natgateway

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Clients of both lists are let in. One that is in both stays until it is in neither.
func TestClientsOfBothLists(t *testing.T) {
	run(t, func(f *fixture) {
		const naming, chosen = 0, 1
		served := func(want ...string) {
			t.Helper()
			f.did(moment)
			got := map[string]bool{}
			for a := range f.made {
				got[a.String()] = true
			}
			all := map[string]bool{}
			for _, a := range want {
				all[a] = true
			}
			if diff := cmp.Diff(all, got); diff != "" {
				t.Errorf("tunnels (-want +got):\n%s", diff)
			}
		}
		f.listIn(naming, map[string]string{"a": "10.0.0.2", "b": "10.0.0.3"})
		f.listIn(chosen, map[string]string{"b": "10.0.0.3", "c": "10.0.0.4"})
		f.start()
		served("10.0.0.2", "10.0.0.3", "10.0.0.4")
		f.listIn(naming, map[string]string{"a": "10.0.0.2"})
		served("10.0.0.2", "10.0.0.3", "10.0.0.4")
		if len(f.forgotten) > 0 {
			t.Errorf("forgot %v, which is a client still", f.forgotten)
		}
		f.listIn(chosen, map[string]string{"c": "10.0.0.4"})
		served("10.0.0.2", "10.0.0.4")
		if diff := cmp.Diff([]string{"10.0.0.3"}, texts(f.forgotten)); diff != "" {
			t.Errorf("forgot (-want +got):\n%s", diff)
		}
		f.listIn(chosen, nil)
		served("10.0.0.2")
	})
}

func texts(addrs []netip.Addr) (all []string) {
	for _, a := range addrs {
		all = append(all, a.String())
	}
	return all
}
