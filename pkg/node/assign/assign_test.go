package assign

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/store/sqlite"
	"github.com/coil-net/coil/pkg/testkit"
)

// network is a Network in memory that can be told to fail or to wait.
type network struct {
	mu    sync.Mutex
	pods  map[store.ID]ipam.Address
	made  map[store.ID]podnet.Attachment
	fail  map[string]error // by method
	enter func(method string)
	wired int // number of Attach calls that succeeded
	// groups are how many links were removed at once.
	groups []int
}

func (n *network) step(ctx context.Context, method string) error {
	if n.enter != nil {
		n.enter(method)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.fail[method]
}

func (n *network) Attach(ctx context.Context, p podnet.Pod) (podnet.Attachment, error) {
	if err := n.step(ctx, "Attach"); err != nil {
		return podnet.Attachment{}, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.pods[store.ID(p.ID())] = p.Address
	n.wired++
	a := podnet.Attachment{
		HostIfName: "veth" + p.ContainerID, HostIfIndex: 10 + n.wired, NetnsInode: 7,
		HostMAC: fmt.Sprintf("02:00:00:00:00:%02x", n.wired), PodMAC: fmt.Sprintf("02:00:00:00:01:%02x", n.wired),
		Gateways: ipam.Address{IPv4: netip.MustParseAddr("169.254.1.1"), IPv6: netip.MustParseAddr("fe80::1")},
	}
	n.made[store.ID(p.ID())] = a
	return a, nil
}

func (n *network) Check(ctx context.Context, p podnet.Pod, a podnet.Attachment) error {
	if err := n.step(ctx, "Check"); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if got := n.pods[store.ID(p.ID())]; got != p.Address {
		return fmt.Errorf("kernel has %s", got)
	}
	want := n.made[store.ID(p.ID())]
	want.Gateways = ipam.Address{} // those of every pod
	if a != want {
		return fmt.Errorf("attachment is %+v, asked for is %+v", want, a)
	}
	return nil
}

func (n *network) Withdraw(ctx context.Context, _ ...ipam.Address) error {
	return n.step(ctx, "Withdraw")
}

func (n *network) RemoveAll(ctx context.Context, targets ...podnet.Target) []error {
	results := make([]error, len(targets))
	if err := n.step(ctx, "RemoveAll"); err != nil {
		for i := range results {
			results[i] = err
		}
		return results
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.groups = append(n.groups, len(targets))
	for _, t := range targets {
		delete(n.pods, store.ID(t.ID))
	}
	return results
}

func (n *network) List(ctx context.Context) ([]podnet.Found, error) {
	if err := n.step(ctx, "List"); err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	var fs []podnet.Found
	for id, a := range n.pods {
		fs = append(fs, podnet.Found{ID: podnet.ID(id), Addresses: a.Addrs()})
	}
	return fs, nil
}

func (n *network) setFail(method string, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.fail[method] = err
}

// supply is a Blocks with fixed blocks.
type supply struct {
	usable []string
	ask    func(ctx context.Context) error
}

func (s *supply) Usable(string) []string   { return s.usable }
func (s *supply) Generation(string) uint64 { return 0 }
func (s *supply) Changed(string)           {}
func (s *supply) Ask(ctx context.Context, _ string, _ uint64) error {
	return s.ask(ctx)
}

// bench is an Assigner over a real record, with one dual-stack block of four addresses.
type bench struct {
	*Assigner
	store  *sqlite.Store
	net    *network
	supply *supply
	end    func() // of Run
}

const suspicion = 30 * time.Second

var errPoolEmpty = errors.New("AddressPool default is exhausted")

func newBench(t *testing.T) *bench {
	t.Helper()
	s, _, err := sqlite.Open(t.Context(), sqlite.Options{
		Path: filepath.Join(t.TempDir(), "coild.db"), Identity: store.Identity{NodeName: "node"}, BootID: "boot", CoolDown: time.Hour,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	block := store.Block{Name: "default-0", Pool: "default", Block: ipam.Block{
		IPv4: netip.MustParsePrefix("10.1.0.0/30"), IPv6: netip.MustParsePrefix("fd00::/126"),
	}}
	if err := s.SetBlocks(t.Context(), []store.Block{block}); err != nil {
		t.Fatal(err)
	}
	b := &bench{
		store:  s,
		net:    &network{pods: map[store.ID]ipam.Address{}, made: map[store.ID]podnet.Attachment{}, fail: map[string]error{}},
		supply: &supply{usable: []string{"default-0"}, ask: func(context.Context) error { return errPoolEmpty }},
	}
	b.Assigner = New(Config{
		BlockTimeout: time.Second, UndoTimeout: 5 * time.Second, Suspicion: suspicion, NodeAddrs: func() ipam.Address { return ipam.Address{} },
	}, s, b.supply, b.net)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- b.Run(ctx) }()
	b.end = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(b.end)
	return b
}

func request(container string) node.AddRequest {
	return node.AddRequest{
		ID: store.ID{ContainerID: container, IfName: "eth0"}, Pod: store.Pod{Namespace: "ns", Name: "pod-" + container},
		Netns: store.Netns{Path: "/run/netns/" + container, Inode: 7}, Pool: "default",
	}
}

// mustAgree fails unless record and kernel have exactly the given containers, once
// the links of the others are removed.
func (b *bench) mustAgree(t *testing.T, containers ...string) {
	t.Helper()
	testkit.Eventually(t, 5*time.Second, "links are removed", func() error {
		b.removals.mu.Lock()
		defer b.removals.mu.Unlock()
		if n := len(b.removals.pending); n > 0 {
			return fmt.Errorf("of %d pools not", n)
		}
		return nil
	})
	all, err := b.store.List(context.WithoutCancel(t.Context()))
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]bool{}
	for _, c := range containers {
		want[c] = true
	}
	b.net.mu.Lock()
	defer b.net.mu.Unlock()
	if len(all) != len(want) || len(b.net.pods) != len(want) {
		t.Errorf("%d records, %d links, want %d", len(all), len(b.net.pods), len(want))
	}
	for _, a := range all {
		if !want[a.ContainerID] || a.State != store.Attached || b.net.pods[a.ID] != a.Address {
			t.Errorf("record %s %s %s; kernel %s", a.ContainerID, a.State, a.Address, b.net.pods[a.ID])
		}
	}
}

func TestAddAnswersAsCNIWants(t *testing.T) {
	b := newBench(t)
	alloc, err := b.Add(t.Context(), request("c1"))
	if err != nil {
		t.Fatal(err)
	}
	var r types100.Result
	if err := json.Unmarshal(alloc.Result, &r); err != nil {
		t.Fatal(err)
	}
	if len(r.Interfaces) != 2 || r.Interfaces[1].Name != "eth0" || r.Interfaces[1].Sandbox != "/run/netns/c1" || r.Interfaces[1].Mac == "" {
		t.Errorf("interfaces %+v", r.Interfaces)
	}
	var ips []string
	for _, ip := range r.IPs {
		if ip.Interface == nil || *ip.Interface != 1 {
			t.Errorf("address %v is not of the pod's interface", ip)
		}
		ips = append(ips, ip.Address.String()+" via "+ip.Gateway.String())
	}
	if got, want := strings.Join(ips, ", "), "10.1.0.0/32 via 169.254.1.1, fd00::/128 via fe80::1"; got != want {
		t.Errorf("addresses %s, want %s", got, want)
	}
	if len(r.Routes) != 2 || r.Routes[0].Dst.String() != "0.0.0.0/0" || r.Routes[1].Dst.String() != "::/0" {
		t.Errorf("routes %+v", r.Routes)
	}
	b.mustAgree(t, "c1")
}

func TestAddTwiceIsOneAddress(t *testing.T) {
	b := newBench(t)
	first, err := b.Add(t.Context(), request("c1"))
	if err != nil {
		t.Fatal(err)
	}
	second, err := b.Add(t.Context(), request("c1"))
	if err != nil {
		t.Fatal(err)
	}
	if first.Address != second.Address || string(first.Result) != string(second.Result) || b.net.wired != 1 {
		t.Errorf("%s then %s, wired %d times; want the recorded answer", first.Address, second.Address, b.net.wired)
	}
	// When the kernel lost it, the same address is wired again.
	b.net.setFail("Check", errors.New("route is missing"))
	third, err := b.Add(t.Context(), request("c1"))
	if err != nil {
		t.Fatal(err)
	}
	if third.Address != first.Address || b.net.wired != 2 {
		t.Errorf("%s, wired %d times; want %s wired again", third.Address, b.net.wired, first.Address)
	}
	b.net.setFail("Check", nil)
	if _, err := b.Add(t.Context(), request("c1")); err != nil || b.net.wired != 2 {
		t.Errorf("wired %d times, %v; want the answer of the second wiring", b.net.wired, err)
	}
	b.mustAgree(t, "c1")
}

// Of a pod that was found in the kernel the record knows neither the namespace nor
// what ADD answered.
func TestAddOfAnAdoptedPod(t *testing.T) {
	b := newBench(t)
	addr := ipam.Address{IPv4: netip.MustParseAddr("10.1.0.2"), IPv6: netip.MustParseAddr("fd00::2")}
	r := request("c1")
	found := store.Allocation{ID: r.ID, Pool: "default", Address: addr, State: store.Attached, Wiring: store.Wiring{HostIfName: "vethx", HostIfIndex: 3}}
	if err := b.store.Adopt(t.Context(), found); err != nil {
		t.Fatal(err)
	}
	got, err := b.Add(t.Context(), r)
	if err != nil || got.Address != addr || len(got.Result) == 0 {
		t.Fatalf("%s, result %s, %v; want the pod wired with its address", got.Address, got.Result, err)
	}
	rec, err := b.store.Get(t.Context(), r.ID)
	if err != nil || rec.Netns != r.Netns || rec.Pod != r.Pod || string(rec.Result) != string(got.Result) {
		t.Errorf("recorded %+v, %v; want what ADD told", rec, err)
	}
	b.mustAgree(t, "c1")
}

// A caller that goes away must not cost a pod its network.
func TestAbandonedAddOfAnAttachedPod(t *testing.T) {
	b := newBench(t)
	if _, err := b.Add(t.Context(), request("c1")); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	b.net.enter = func(method string) {
		if method == "Check" {
			cancel()
		}
	}
	if _, err := b.Add(ctx, request("c1")); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	b.mustAgree(t, "c1")
}

func TestSandboxMadeAgain(t *testing.T) {
	b := newBench(t)
	if _, err := b.Add(t.Context(), request("c1")); err != nil {
		t.Fatal(err)
	}
	again := request("c1")
	again.Netns.Inode = 8
	if _, err := b.Add(t.Context(), again); err != nil {
		t.Fatal(err)
	}
	got, err := b.store.Get(t.Context(), again.ID)
	if err != nil || got.Netns.Inode != 8 {
		t.Errorf("recorded %+v, %v; want the new namespace", got.Netns, err)
	}
	b.mustAgree(t, "c1")
}

func TestFailedAddLeavesNothing(t *testing.T) {
	for _, method := range []string{"Attach"} {
		t.Run(method, func(t *testing.T) {
			b := newBench(t)
			b.net.setFail(method, errors.New("netlink: out of memory"))
			_, err := b.Add(t.Context(), request("c1"))
			if err == nil || !strings.Contains(err.Error(), "out of memory") {
				t.Errorf("error %v does not say what happened", err)
			}
			b.mustAgree(t)
		})
	}
}

func TestAbandonedAddLeavesNothing(t *testing.T) {
	b := newBench(t)
	ctx, cancel := context.WithCancel(t.Context())
	b.net.enter = func(method string) {
		if method == "Attach" {
			cancel()
		}
	}
	if _, err := b.Add(ctx, request("c1")); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	b.mustAgree(t)
}

// A caller that goes away after the wiring must not leave an address behind.
func TestAddAbandonedAtTheEnd(t *testing.T) {
	b := newBench(t)
	ctx, cancel := context.WithCancel(t.Context())
	real := b.Assigner.net
	b.Assigner.net = cancelAfterAttach{real, cancel}
	if _, err := b.Add(ctx, request("c1")); err == nil {
		t.Error("an ADD that nobody waits for succeeded")
	}
	b.mustAgree(t)
}

type cancelAfterAttach struct {
	Network
	cancel context.CancelFunc
}

func (c cancelAfterAttach) Attach(ctx context.Context, p podnet.Pod) (podnet.Attachment, error) {
	defer c.cancel()
	return c.Network.Attach(ctx, p)
}

func TestDelStopsAnAddThatWaits(t *testing.T) {
	b := newBench(t)
	b.supply.usable = nil
	asked := make(chan struct{})
	b.supply.ask = func(ctx context.Context) error { close(asked); <-ctx.Done(); return ctx.Err() }
	b.cfg.BlockTimeout = time.Minute
	added := make(chan error, 1)
	go func() {
		_, err := b.Add(t.Context(), request("c1"))
		added <- err
	}()
	<-asked
	if err := b.Del(t.Context(), request("c1").ID); err != nil {
		t.Errorf("Del: %v", err)
	}
	if err := <-added; !errors.Is(err, node.ErrDeleted) {
		t.Errorf("Add: %v, want ErrDeleted", err)
	}
	b.mustAgree(t)
}

func TestDelStopsAnAddThatWires(t *testing.T) {
	b := newBench(t)
	entered, release := make(chan struct{}), make(chan struct{})
	var once sync.Once
	b.net.enter = func(method string) {
		if method == "Attach" {
			once.Do(func() { close(entered) })
			<-release
		}
	}
	added := make(chan error, 1)
	go func() {
		_, err := b.Add(t.Context(), request("c1"))
		added <- err
	}()
	<-entered
	deleted := make(chan error, 1)
	go func() { deleted <- b.Del(t.Context(), request("c1").ID) }()
	testkit.Eventually(t, 5*time.Second, "the DEL has come", func() error {
		b.flight.mu.Lock()
		defer b.flight.mu.Unlock()
		if b.flight.calls[request("c1").ID].stopped {
			return nil
		}
		return errors.New("not yet")
	})
	close(release)
	if err := <-deleted; err != nil {
		t.Errorf("Del: %v", err)
	}
	if err := <-added; !errors.Is(err, node.ErrDeleted) {
		t.Errorf("Add: %v, want ErrDeleted", err)
	}
	b.mustAgree(t)
}

func TestDelIsIdempotent(t *testing.T) {
	b := newBench(t)
	id := request("c1").ID
	if err := b.Del(t.Context(), id); err != nil {
		t.Errorf("unknown container: %v", err)
	}
	if _, err := b.Add(t.Context(), request("c1")); err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		if err := b.Del(t.Context(), id); err != nil {
			t.Errorf("Del number %d: %v", i+1, err)
		}
	}
	b.mustAgree(t)
}

// mustState fails unless the record of a container is in a state.
func (b *bench) mustState(t *testing.T, container string, want store.State) {
	t.Helper()
	got, err := b.store.Get(t.Context(), request(container).ID)
	if err != nil || got.State != want {
		t.Errorf("record of %s is %q, %v; want %s", container, got.State, err, want)
	}
}

// holdLinks makes the removal of links wait until release is called; held gets a value
// when one waits.
func (b *bench) holdLinks(t *testing.T) (held chan struct{}, release func()) {
	t.Helper()
	held = make(chan struct{}, 16)
	gate := make(chan struct{})
	release = sync.OnceFunc(func() { close(gate) })
	t.Cleanup(release)
	b.net.enter = func(method string) {
		if method == "RemoveAll" {
			held <- struct{}{}
			<-gate
		}
	}
	return held, release
}

// DEL answers while the link is still there: nothing reaches the pod, and its address
// isn't given to another one.
func TestDelDoesNotWaitForTheLink(t *testing.T) {
	b := newBench(t)
	first, err := b.Add(t.Context(), request("c1"))
	if err != nil {
		t.Fatal(err)
	}
	held, release := b.holdLinks(t)
	withdrawn := false
	enter := b.net.enter
	b.net.enter = func(method string) {
		if method == "Withdraw" {
			withdrawn = true
		}
		enter(method)
	}
	for i := range 2 {
		if err := b.Del(t.Context(), request("c1").ID); err != nil {
			t.Fatalf("Del number %d: %v", i+1, err)
		}
		if !withdrawn {
			t.Error("DEL answers before the routes are withdrawn")
		}
	}
	<-held
	b.mustState(t, "c1", store.Releasing)
	second, err := b.Add(t.Context(), request("c2"))
	if err != nil || second.Address == first.Address {
		t.Errorf("c2 got %s, %v; the link of c1 with %s is still there", second.Address, err, first.Address)
	}
	if err := b.Check(t.Context(), request("c1").ID, "", nil); !errors.Is(err, store.ErrState) {
		t.Errorf("Check: %v, want ErrState", err)
	}
	if err := b.GC(t.Context(), nil, time.Now()); err != nil {
		t.Errorf("GC: %v", err)
	}
	if err := b.Sweep(t.Context()); err != nil {
		t.Errorf("Sweep: %v", err)
	}
	release()
	b.mustAgree(t, "c2")
}

// ADD with the ID of an attachment whose link is being removed waits for that.
func TestAddWaitsForTheLinkOfItsID(t *testing.T) {
	b := newBench(t)
	first, err := b.Add(t.Context(), request("c1"))
	if err != nil {
		t.Fatal(err)
	}
	held, release := b.holdLinks(t)
	if err := b.Del(t.Context(), request("c1").ID); err != nil {
		t.Fatal(err)
	}
	<-held
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := b.Add(ctx, request("c1")); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("ADD while the link is there: %v", err)
	}
	b.mustState(t, "c1", store.Releasing)
	release()
	second, err := b.Add(t.Context(), request("c1"))
	if err != nil || second.Address == first.Address {
		t.Errorf("ADD after the link is gone: %s, %v; %s is cooling", second.Address, err, first.Address)
	}
	b.mustAgree(t, "c1")
}

// What comes while links are removed is removed together.
func TestLinksAreRemovedInGroups(t *testing.T) {
	b := newBench(t)
	for _, c := range []string{"c1", "c2", "c3", "c4"} {
		if _, err := b.Add(t.Context(), request(c)); err != nil {
			t.Fatal(err)
		}
	}
	held, release := b.holdLinks(t)
	if err := b.Del(t.Context(), request("c1").ID); err != nil {
		t.Fatal(err)
	}
	<-held
	for _, c := range []string{"c2", "c3", "c4"} {
		if err := b.Del(t.Context(), request(c).ID); err != nil {
			t.Fatal(err)
		}
	}
	release()
	b.mustAgree(t)
	if d := cmp.Diff([]int{1, 3}, b.net.groups); d != "" {
		t.Errorf("links removed at once (-want +got):\n%s", d)
	}
}

// A removal that fails is tried again without being asked, and the address isn't
// given meanwhile.
func TestRemovalThatFails(t *testing.T) {
	b := newBench(t)
	first, err := b.Add(t.Context(), request("c1"))
	if err != nil {
		t.Fatal(err)
	}
	b.net.setFail("RemoveAll", errors.New("netlink: busy"))
	if err := b.Del(t.Context(), request("c1").ID); err != nil {
		t.Fatal(err)
	}
	second, err := b.Add(t.Context(), request("c2"))
	if err != nil {
		t.Fatal(err)
	}
	if second.Address == first.Address {
		t.Errorf("%s was given again while its link is still there", first.Address)
	}
	b.mustState(t, "c1", store.Releasing)
	b.net.setFail("RemoveAll", nil)
	b.mustAgree(t, "c2")
}

// A DEL that fails before that says so, and is finished by the next one or by Sweep.
func TestDelThatFails(t *testing.T) {
	for _, finish := range []struct {
		name string
		do   func(b *bench, ctx context.Context) error
	}{
		{"Del", func(b *bench, ctx context.Context) error { return b.Del(ctx, request("c1").ID) }},
		{"Sweep", func(b *bench, ctx context.Context) error { return b.Sweep(ctx) }},
	} {
		t.Run(finish.name, func(t *testing.T) {
			b := newBench(t)
			if _, err := b.Add(t.Context(), request("c1")); err != nil {
				t.Fatal(err)
			}
			b.net.setFail("Withdraw", errors.New("netlink: busy"))
			if err := b.Del(t.Context(), request("c1").ID); err == nil {
				t.Fatal("Del succeeded though packets still reach the pod")
			}
			b.mustState(t, "c1", store.Releasing)
			b.net.setFail("Withdraw", nil)
			if err := finish.do(b, t.Context()); err != nil {
				t.Error(err)
			}
			b.mustAgree(t)
		})
	}
}

// At the end, the links that are left are removed; a DEL that comes later has its
// link removed after the next start.
func TestRunEnds(t *testing.T) {
	b := newBench(t)
	for _, c := range []string{"c1", "c2", "c3"} {
		if _, err := b.Add(t.Context(), request(c)); err != nil {
			t.Fatal(err)
		}
	}
	held, release := b.holdLinks(t)
	for _, c := range []string{"c1", "c2"} {
		if err := b.Del(t.Context(), request(c).ID); err != nil {
			t.Fatal(err)
		}
	}
	<-held
	ended := make(chan struct{})
	go func() { b.end(); close(ended) }()
	release()
	<-ended
	b.mustAgree(t, "c3")
	if err := b.Del(t.Context(), request("c3").ID); err != nil {
		t.Error(err)
	}
	b.mustState(t, "c3", store.Releasing)
}

func TestPoolWithoutAddresses(t *testing.T) {
	b := newBench(t)
	for i := range 4 {
		if _, err := b.Add(t.Context(), request(fmt.Sprint("c", i))); err != nil {
			t.Fatal(err)
		}
	}
	_, err := b.Add(t.Context(), request("c4"))
	if !errors.Is(err, node.ErrUnavailable) || !errors.Is(err, errPoolEmpty) {
		t.Errorf("error %v, want ErrUnavailable with the reason", err)
	}
	// The address that was freed just now is better than none, also if its link is
	// still there.
	if err := b.Del(t.Context(), request("c2").ID); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Add(t.Context(), request("c4")); err != nil {
		t.Errorf("with a cooling address: %v", err)
	}
	b.mustAgree(t, "c0", "c1", "c3", "c4")
}

func TestBlockThatDoesNotCome(t *testing.T) {
	b := newBench(t)
	b.supply.usable = nil
	b.cfg.BlockTimeout = 20 * time.Millisecond
	b.supply.ask = func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
	_, err := b.Add(t.Context(), request("c1"))
	if !errors.Is(err, node.ErrUnavailable) || !strings.Contains(err.Error(), "coil-ipam-controller") || !strings.Contains(err.Error(), `"default"`) {
		t.Errorf("error %v, want one that names the pool and what to look at", err)
	}
	b.mustAgree(t)
}

func TestManyAddsAtOnce(t *testing.T) {
	b := newBench(t)
	block := store.Block{Name: "default-1", Pool: "default", Block: ipam.Block{
		IPv4: netip.MustParsePrefix("10.2.0.0/25"), IPv6: netip.MustParsePrefix("fd01::/121"),
	}}
	if err := b.store.SetBlocks(t.Context(), []store.Block{block}); err != nil {
		t.Fatal(err)
	}
	b.supply.usable = []string{"default-1"}
	var mu sync.Mutex
	seen := map[ipam.Address]string{}
	var wg sync.WaitGroup
	var want []string
	for i := range 100 {
		c := fmt.Sprint("c", i)
		if i%2 == 0 {
			want = append(want, c)
		}
		wg.Go(func() {
			alloc, err := b.Add(t.Context(), request(c))
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			if other, ok := seen[alloc.Address]; ok {
				t.Errorf("%s was given to %s and %s", alloc.Address, other, c)
			}
			seen[alloc.Address] = c
			mu.Unlock()
			if i%2 == 1 {
				if err := b.Del(t.Context(), request(c).ID); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	b.mustAgree(t, want...)
}

func TestCheck(t *testing.T) {
	b := newBench(t)
	id := request("c1").ID
	if err := b.Check(t.Context(), id, "", nil); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("unknown container: %v", err)
	}
	alloc, err := b.Add(t.Context(), request("c1"))
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Check(t.Context(), id, "", alloc.Address.Addrs()); err != nil {
		t.Errorf("intact: %v", err)
	}
	wrong := netip.MustParseAddr("192.0.2.1")
	b.net.setFail("Check", errors.New("route is missing"))
	err = b.Check(t.Context(), id, "", []netip.Addr{wrong})
	if err == nil || !strings.Contains(err.Error(), "192.0.2.1") || !strings.Contains(err.Error(), "route is missing") {
		t.Errorf("error %v, want all that is wrong", err)
	}
}

func TestGCReleasesInTwoPhases(t *testing.T) {
	b := newBench(t)
	for _, c := range []string{"c1", "c2"} {
		if _, err := b.Add(t.Context(), request(c)); err != nil {
			t.Fatal(err)
		}
	}
	valid := []store.ID{request("c1").ID}
	now := time.Now().Add(time.Second)
	gc := func(after time.Duration) {
		t.Helper()
		if err := b.GC(t.Context(), valid, now.Add(after)); err != nil {
			t.Fatal(err)
		}
	}
	gc(-time.Hour) // called before c2 was attached
	gc(0)
	gc(suspicion / 2)
	b.mustAgree(t, "c1", "c2")
	gc(suspicion)
	b.mustAgree(t, "c1")
}

func TestGCForgetsASuspicion(t *testing.T) {
	b := newBench(t)
	if _, err := b.Add(t.Context(), request("c1")); err != nil {
		t.Fatal(err)
	}
	now := time.Now().Add(time.Second)
	listed := []store.ID{request("c1").ID}
	for i, valid := range [][]store.ID{nil, listed, nil} {
		if err := b.GC(t.Context(), valid, now.Add(time.Duration(i)*suspicion)); err != nil {
			t.Fatal(err)
		}
	}
	b.mustAgree(t, "c1")
}

func TestSweepNeverTrustsAFailedList(t *testing.T) {
	b := newBench(t)
	if _, err := b.Add(t.Context(), request("c1")); err != nil {
		t.Fatal(err)
	}
	b.net.setFail("List", errors.New("dump interrupted"))
	if err := b.Sweep(t.Context()); err == nil {
		t.Error("Sweep succeeded without a list")
	}
	b.mustAgree(t, "c1")
}

func TestSweepReleasesWhatLostItsLink(t *testing.T) {
	b := newBench(t)
	if _, err := b.Add(t.Context(), request("c1")); err != nil {
		t.Fatal(err)
	}
	b.net.mu.Lock()
	clear(b.net.pods)
	b.net.mu.Unlock()
	isLost := func(store.Allocation) bool { return true }
	now := time.Now().Add(time.Second)
	for _, at := range []time.Time{now, now.Add(suspicion)} {
		if err := b.releaseLost(t.Context(), b.unlinked, at, isLost); err != nil {
			t.Fatal(err)
		}
	}
	b.mustAgree(t)
	testkit.Eventually(t, time.Second, "the address cools", func() error {
		us, err := b.store.Usage(t.Context())
		if err == nil && us[0].Cooling != 1 {
			err = fmt.Errorf("%d cooling", us[0].Cooling)
		}
		return err
	})
}
