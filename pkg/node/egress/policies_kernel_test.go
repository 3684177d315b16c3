package egress

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/pkg/clientnet"
	"github.com/coil-net/coil/pkg/clientnet/clientnettest"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/testkit"
)

// In the kernel, a policy makes a pod that runs a client of its Egress, and one that goes leaves nothing there. Packets that may leave as
// those of other pods while nothing forwards them do, and others don't.
func TestPoliciesInTheKernel(t *testing.T) {
	p := clientnettest.NewPod(t) // it asks for the tier
	p.Outside("203.0.113.7/32", "2001:db8::7/128", "198.51.100.7/32")
	w := newWorld()
	w.egress("all", "10.96.0.9", "0.0.0.0/0", "::/0")
	w.egress("a", "10.96.0.1", "203.0.113.0/24", "2001:db8::/32")
	w.services["net/a"].Spec.ClusterIPs = append(w.services["net/a"].Spec.ClusterIPs, "fd96::1")
	w.pod("p", "")
	w.labelled("p", "web")
	m := w.manager(false)
	m.net = clientnet.New(dataplane.ProtocolNode, p.Links, nil)
	at := node.Sandbox{ID: sandboxOf("p").ID, Pod: sandboxOf("p").Pod, Netns: p.At(), Address: p.Client.Address}
	finish := testkit.Must(m.Begin(t.Context(), at.Pod))(t)
	testkit.Check(t, finish(t.Context(), at))
	clean := p.NS.IP(t, "rule") + p.NS.IP(t, "-6", "rule") + p.NS.IP(t, "link")

	follow := func(what string, ways map[string]string, policies ...metav1.Object) {
		t.Helper()
		w.policies = policies
		if err := m.sync(t.Context(), "p"); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		for dst, want := range ways {
			if got := p.Way(dst); got != want {
				t.Errorf("%s: %s goes by %s, want %s", what, dst, got, want)
			}
			// The ruleset is of one mind with the routes.
			if answered := ping(p, dst) == nil; answered != (want == "eth0") {
				t.Errorf("%s: %s goes by %s, and answers: %t", what, dst, want, answered)
			}
		}
		testkit.Check(t, m.Check(t.Context(), at.ID))
	}
	const a, other, six = "203.0.113.7", "198.51.100.7", "2001:db8::7"
	follow("no policy", map[string]string{a: "eth0", other: "eth0", six: "eth0"})
	follow("a policy", map[string]string{a: "tunnel", other: "eth0", six: "tunnel"}, policyOf("p", "a"))
	follow("another one", map[string]string{a: "tunnel", other: "tunnel", six: "tunnel"}, policyOf("p", "a"), policyOf("q", "all"))
	w.egress("a", "", "203.0.113.0/24", "2001:db8::/32")
	follow("nothing forwards", map[string]string{a: "nowhere", other: "tunnel", six: "nowhere"}, policyOf("p", "a"), policyOf("q", "all"))
	follow("nothing forwards, open", map[string]string{a: "eth0", other: "tunnel", six: "eth0"}, policyOf("p", "a", openly), policyOf("q", "all"))
	w.egress("a", "10.96.0.1", "203.0.113.0/24", "2001:db8::/32")
	follow("one family forwards, open", map[string]string{a: "tunnel", other: "tunnel", six: "eth0"}, policyOf("p", "a", openly), policyOf("q", "all"))
	delete(w.egresses, "net/a")
	follow("deleted, open", map[string]string{a: "eth0", other: "eth0", six: "eth0"}, policyOf("p", "a", openly))
	follow("deleted, closed", map[string]string{a: "nowhere", other: "eth0", six: "nowhere"}, policyOf("p", "a"))
	follow("no policy any more", map[string]string{a: "eth0", other: "eth0", six: "eth0"})
	if now := p.NS.IP(t, "rule") + p.NS.IP(t, "-6", "rule") + p.NS.IP(t, "link"); now != clean {
		t.Errorf("left is\n%s\nwhere it was\n%s", now, clean)
	}
}

// ping asks an address for an answer.
func ping(p *clientnettest.Pod, dst string) error {
	family := "-4"
	if netip.MustParseAddr(dst).Is6() {
		family = "-6"
	}
	out, err := p.NS.Run("ping", family, "-c1", "-W"+fmt.Sprint(int(testkit.Timeout(time.Second)/time.Second)), dst)
	if err != nil {
		return errors.Join(err, errors.New(out))
	}
	return nil
}
