package floating

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/integration/rig/rigtest"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/keys"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

const egressNamespace = "internet"

// fixture is a rig with three nodes, on each of which a pod stands for a router: it answers pings of the floating address.
type fixture struct {
	*rig.Rig
	t       *testing.T
	name    string // of the Egress, and the pool
	nodes   []*rig.Node
	routers []*rig.Sandbox
	block   string
	addrs   []netip.Addr
	// unready are routers that take no packets, and ending those that do until they have gone; by their UID.
	unready, ending map[string]bool
}

// newFixture returns a rig whose nodes may have one address of a pool, in their order.
func newFixture(t *testing.T, name string, subnet v2.SubnetSet) *fixture {
	t.Helper()
	f := &fixture{Rig: shared.Rig(t), t: t, name: name, unready: map[string]bool{}, ending: map[string]bool{}}
	ctx := t.Context()
	testkit.Check(t, f.ensure(), f.AddPool(ctx, name, 0, subnet), f.Announce(ctx, name, v2.AnnounceNeighbor))
	for range 3 {
		n := testkit.Must(f.AddNode(ctx, rig.NodeOptions{}))(t)
		f.nodes = append(f.nodes, n)
		t.Cleanup(func() {
			if t.Failed() {
				t.Logf("the end of the log of %s:\n%s", n.Name, n.Coild.Logs(60))
			}
		})
		s := testkit.Must(n.NewSandbox(ctx, rig.SandboxOptions{Namespace: egressNamespace}))(t)
		testkit.Must(s.Add(ctx))(t)
		f.routers = append(f.routers, s)
	}
	f.list()
	claim := &v2.AddressClaim{ObjectMeta: metav1.ObjectMeta{Namespace: egressNamespace, Name: name}, Spec: v2.AddressClaimSpec{Pool: name, Count: new(int32(1))}}
	testkit.Must(f.Coil.CoilV2().AddressClaims(egressNamespace).Create(ctx, claim, metav1.CreateOptions{}))(t)
	testkit.Eventually(t, 20*time.Second, "the claim has an address", func() error {
		c, err := f.Coil.CoilV2().AddressClaims(egressNamespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil || len(c.Status.Addresses) == 0 {
			return errors.Join(err, errors.New("none"))
		}
		f.block = c.Status.Addresses[0].Block
		f.addrs = []netip.Addr{netip.MustParseAddr(c.Status.Addresses[0].IPv4), netip.MustParseAddr(c.Status.Addresses[0].IPv6)}
		return nil
	})
	for _, s := range f.routers {
		for _, a := range f.addrs {
			testkit.Must(s.Run(ctx, "ip", "address", "add", netip.PrefixFrom(a, a.BitLen()).String(), "dev", "lo"))(t)
		}
		testkit.Must(s.Run(ctx, "ip", "link", "set", "lo", "up"))(t)
	}
	f.place("", 0, 1, 2)
	return f
}

// ensure makes what all tests have: the namespace of routers, and the Secret with the keys.
func (f *fixture) ensure() error {
	ctx := f.t.Context()
	err := f.AddNamespace(ctx, egressNamespace, "routers")
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	_, errSecret := f.Core.CoreV1().Secrets(keys.Namespace).Create(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: keys.Name}}, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(errSecret) {
		errSecret = nil
	}
	return errors.Join(err, errSecret, f.AddPool(ctx, "routers", 4, rig.Dual("10.0.0.0/16", "fd00::/112")))
}

// list writes the EndpointSlice of the Egress's Service, as kube-controller-manager does.
func (f *fixture) list() {
	f.t.Helper()
	s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: egressNamespace, Name: f.name, Labels: plan.RouterLabels(f.name)}, AddressType: discoveryv1.AddressTypeIPv4}
	s.Labels[discoveryv1.LabelServiceName] = f.name
	for _, r := range f.routers {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{"10.0.0.1"},
			Conditions: discoveryv1.EndpointConditions{
				Ready: new(!f.unready[r.UID] && !f.ending[r.UID]), Serving: new(!f.unready[r.UID]), Terminating: new(f.ending[r.UID]),
			},
			TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: egressNamespace, Name: r.Name, UID: types.UID(r.UID)},
		})
	}
	api := f.Core.DiscoveryV1().EndpointSlices(egressNamespace)
	_, err := api.Create(f.t.Context(), s, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		_, err = api.Update(f.t.Context(), s, metav1.UpdateOptions{})
	}
	testkit.Check(f.t, err)
}

// place writes which nodes may have the address, in order, and to which it is to move.
func (f *fixture) place(movingTo string, order ...int) {
	f.t.Helper()
	var successors []v2.FloatingNode
	for _, i := range order {
		n := f.nodes[i]
		successors = append(successors, v2.FloatingNode{Node: n.Name, Addresses: []string{n.Addr4.String(), n.Addr6.String()}, PodUID: types.UID(f.routers[i].UID)})
	}
	patch := testkit.Must(json.Marshal(map[string]any{"floating": map[string]any{"successors": successors, "movingTo": movingTo}}))(f.t)
	testkit.Must(f.Coil.CoilV2().AddressBlocks().Patch(f.t.Context(), f.block, types.MergePatchType, patch, metav1.PatchOptions{}))(f.t)
}

// holding is what the API server says of the address.
func (f *fixture) holding() v2.FloatingHolding {
	f.t.Helper()
	b := testkit.Must(f.Coil.CoilV2().AddressBlocks().Get(f.t.Context(), f.block, metav1.GetOptions{}))(f.t)
	if got := b.Labels[v2.LabelFloatingHolder]; got != b.Floating.Holding.Holder {
		f.t.Errorf("the label says %q, and the holder is %q", got, b.Floating.Holding.Holder)
	}
	return b.Floating.Holding
}

// held waits until a node has the address: the host outside reaches it there, in both families, and nowhere else.
func (f *fixture) held(i int) {
	f.t.Helper()
	n := f.nodes[i]
	testkit.Eventually(f.t, 20*time.Second, fmt.Sprintf("%s has %s", n.Name, f.addrs), func() error {
		if h := f.holding(); h.Holder != n.Name || h.PodUID != types.UID(f.routers[i].UID) {
			return fmt.Errorf("%+v", h)
		}
		return f.answering(i)
	})
}

// answering returns an error unless exactly one node of those that run answers for the address.
func (f *fixture) answering(want int) error {
	for i, n := range f.nodes {
		if !n.Coild.Running() {
			continue
		}
		out, err := n.Run(f.t.Context(), "sh", "-c", "ip -4 neigh show proxy; ip -6 neigh show proxy; ip route show table 119 proto 32; ip -6 route show table 119 proto 32")
		if err != nil {
			return err
		}
		for _, a := range f.addrs {
			if got, should := strings.Count(out, a.String()), map[bool]int{true: 2}[i == want]; got != should {
				return fmt.Errorf("%s has %d objects of %s, want %d:\n%s", n.Name, got, a, should, out)
			}
		}
	}
	return nil
}

// pings pings the address from outside, in both families.
func (f *fixture) pings() (all []*netlab.Pinger) {
	f.t.Helper()
	for _, a := range f.addrs {
		all = append(all, rigtest.Pings(f.t, func() (*netlab.Pinger, error) { return f.PingOutside(a) }))
	}
	return all
}

// lasts lets a fault last for some time.
func lasts(t *testing.T, d time.Duration) {
	t.Helper()
	select {
	case <-time.After(d):
	case <-t.Context().Done():
	}
}

// outage ends pings, and returns for how long they weren't answered.
func outage(t *testing.T, pings []*netlab.Pinger) (longest time.Duration) {
	t.Helper()
	const every = 10 * time.Millisecond
	for _, p := range pings {
		sent, answered, err := p.End()
		testkit.Check(t, err)
		longest = max(longest, time.Duration(sent-answered)*every)
	}
	return longest
}

// The address moves when it is asked to, and when its router isn't ready any more; an outage of the API server moves nothing.
func TestAddressMoves(t *testing.T) {
	f := newFixture(t, "moving", rig.Dual("10.255.70.0/32", "fd00:255::1:300/128"))
	f.held(0)
	pings := f.pings()

	f.API.StopServer()
	lasts(t, 5*time.Second) // longer than any lease
	testkit.Check(t, f.API.StartServer(t.Context()))
	f.held(0)
	if gone := outage(t, pings); gone > 0 {
		t.Errorf("in an outage of the API server the address was silent for %s", gone)
	}

	epoch := f.holding().Epoch
	pings = f.pings()
	f.place(f.nodes[1].Name, 1, 0, 2)
	f.held(1)
	f.unready[f.routers[1].UID] = true
	f.list()
	f.held(0)
	if gone := outage(t, pings); gone > testkit.Timeout(time.Second) {
		t.Errorf("in two moves the address was silent for %s", gone)
	}
	if now := f.holding(); now.Epoch != epoch+2 || !now.HandedOver {
		t.Errorf("%+v, want the epoch %d", now, epoch+2)
	}

	// Released: nobody has it.
	testkit.Check(t, f.Coil.CoilV2().AddressClaims(egressNamespace).Delete(t.Context(), f.name, metav1.DeleteOptions{}))
	testkit.Eventually(t, 20*time.Second, "no node answers", func() error { return f.answering(-1) })
}

// The node of the holder loses power: the next one answers within seconds. What comes back is no holder.
func TestPowerCut(t *testing.T) {
	f := newFixture(t, "power", rig.Dual("10.255.71.0/32", "fd00:255::1:310/128"))
	f.held(0)
	var taken []time.Duration
	for _, i := range []int{0, 1} {
		pings := f.pings()
		testkit.Check(t, f.nodes[i].PowerCut(t.Context()))
		f.held(1 - i)
		taken = append(taken, outage(t, pings))
		testkit.Check(t, f.nodes[i].PowerOn(t.Context()), f.nodes[i].Start(t.Context()))
		s := testkit.Must(f.nodes[i].NewSandbox(t.Context(), rig.SandboxOptions{Namespace: egressNamespace}))(t)
		testkit.Must(s.Add(t.Context()))(t)
		for _, a := range f.addrs {
			testkit.Must(s.Run(t.Context(), "ip", "address", "add", netip.PrefixFrom(a, a.BitLen()).String(), "dev", "lo"))(t)
		}
		f.routers[i] = s
		f.list()
		f.place("", 1-i, i, 2)
		f.held(1 - i)
	}
	t.Logf("silent for %s after power cuts", taken)
	if longest := slices.Max(taken); longest > testkit.Limit(5*time.Second) {
		t.Errorf("the address was silent for %s after a power cut", longest)
	}
}

// coild is killed: the address is at one node again soon, and the kernel of a node whose coild stays away stops by itself.
func TestKilledHolder(t *testing.T) {
	f := newFixture(t, "killed", rig.Dual("10.255.72.0/32", "fd00:255::1:320/128"))
	f.held(0)
	pings := f.pings()
	f.nodes[0].Coild.Kill()
	f.held(1)
	if gone := outage(t, pings); gone > testkit.Limit(5*time.Second) {
		t.Errorf("the address was silent for %s after coild was killed", gone)
	}
	testkit.Check(t, f.nodes[0].Start(t.Context()))
	f.held(1)
	// Cut off from the API server, the holder is believed by its peers.
	pings = f.pings()
	f.nodes[1].CutAPI(true)
	lasts(t, 5*time.Second)
	f.nodes[1].CutAPI(false)
	f.held(1)
	if gone := outage(t, pings); gone > 0 {
		t.Errorf("cut off from the API server, the holder was silent for %s", gone)
	}
}
