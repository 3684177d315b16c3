package floating

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"

	"github.com/coil-net/coil/generated/clientset/versioned/fake"
	typed "github.com/coil-net/coil/generated/clientset/versioned/typed/coil/v2"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/holding"
	"github.com/coil-net/coil/pkg/peers"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/fakeapi"
)

const blockResource = "addressblocks"

// worlds counts the worlds of this process: each has a network of loopback addresses of its own.
var worlds atomic.Int32

// world has nodes that send each other real datagrams, an API server in memory, and a kernel that only notes for what it answers.
type world struct {
	t      *testing.T
	api    *fakeapi.Server
	port   int
	net    int
	nodes  []*node
	key    []byte
	blocks []string // UIDs
}

// node is a machine of the world.
type node struct {
	*world
	name string
	addr netip.Addr
	// noAPI and noPeers cut it off. blind stops its watch alone.
	noAPI, noPeers, blind atomic.Bool
	// heard takes datagrams that the node sends; nil is nobody.
	heard func(datagram []byte)
	mover Mover
	// copyTime is the driver's; 0 is its own.
	copyTime time.Duration
	kernel

	driver *Driver
	stop   func()
}

// kernel is a Place and a Targets.
type kernel struct {
	mu sync.Mutex
	// unready are targets that can't take packets, and gone those that aren't here. deaf is a kernel that doesn't stop when it is asked to.
	unready, gone, deaf bool
	answers             map[string][]span
	ports               []Port // of the last order to answer
}

// span is a time in which the node answers for an address.
type span struct {
	from, to time.Time
	epoch    int64
}

func (k *kernel) Answer(_ context.Context, o Order) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	now := time.Now()
	k.ports = o.Ports
	spans := k.answers[o.ID]
	if last := len(spans) - 1; last >= 0 && spans[last].to.After(now) && spans[last].epoch == o.Epoch {
		spans[last].to = o.Until
	} else if o.Until.After(now) {
		k.answers[o.ID] = append(spans, span{now, o.Until, o.Epoch})
	}
	return nil
}

func (k *kernel) Stop(_ context.Context, a Address) error {
	k.mu.Lock()
	deaf := k.deaf
	k.mu.Unlock()
	if deaf {
		return errors.New("netlink is broken")
	}
	k.end(a.ID)
	return nil
}

// set changes what the kernel does.
func (k *kernel) set(change func(*kernel)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	change(k)
}

func (k *kernel) end(id string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	spans := k.answers[id]
	if last := len(spans) - 1; last >= 0 && spans[last].to.After(time.Now()) {
		spans[last].to = time.Now()
	}
}

func (k *kernel) Ready(Address) (ready, known bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return !k.unready && !k.gone, true
}

func (k *kernel) Here(types.UID) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return !k.gone
}

// spans returns when the node has answered for an address.
func (k *kernel) spans(id string) []span {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.answers[id])
}

// newWorld makes nodes that run, of which each has some addresses.
func newWorld(t *testing.T, nodes, addresses int, change ...func(*world)) *world {
	t.Helper()
	w := &world{
		t: t, api: fakeapi.New(t, map[string]runtime.Object{blockResource: &v2.AddressBlockList{}}),
		net: int(worlds.Add(1)), key: []byte("a key of 32 bytes, known to all."),
	}
	w.port = testkit.FreeUDPPort(t)
	for i := range nodes {
		w.nodes = append(w.nodes, &node{
			world: w, name: fmt.Sprintf("n%d", i), addr: netip.AddrFrom4([4]byte{127, 7, byte(w.net), byte(1 + i)}),
			kernel: kernel{answers: map[string][]span{}},
		})
	}
	for i := range addresses {
		var to []v2.FloatingNode
		for j := range nodes {
			n := w.nodes[(i+j)%nodes]
			to = append(to, v2.FloatingNode{Node: n.name, Addresses: []string{n.addr.String()}, PodUID: types.UID("pod-" + n.name)})
		}
		// On a busy machine another node would take it before the first one.
		first := v2.FloatingHolding{Holder: to[0].Node, PodUID: to[0].PodUID, Epoch: 1, HandedOver: true, Voters: to}
		b := &v2.AddressBlock{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("p-%d", i), Labels: map[string]string{
				v2.LabelPool: "p", v2.LabelFloating: v2.FloatingValue, v2.LabelReserved: "true", v2.LabelFloatingHolder: first.Holder,
			}},
			Index: int32(i), IPv4: new(fmt.Sprintf("192.0.2.%d/32", i)),
			Floating: &v2.Floating{Claim: "c", Owner: v2.FloatingOwner{Kind: "Egress"}, Successors: to, Holding: first},
		}
		w.api.Put(blockResource, b)
		w.blocks = append(w.blocks, string(b.UID))
	}
	for _, c := range change {
		c(w)
	}
	for _, n := range w.nodes {
		n.start()
	}
	w.settled("all addresses are at their first successors", func(i int, b *v2.AddressBlock) error {
		return w.answeredBy(b, w.nodes[i%nodes])
	})
	t.Cleanup(w.exclusive)
	return w
}

// start begins a life of the program on a node.
func (n *node) start() {
	registry := prometheus.NewRegistry()
	link := peers.New(peers.Config{
		Node: n.name, Port: n.port, Addrs: func() []netip.Addr { return []netip.Addr{n.addr} }, Keys: func() [][]byte { return [][]byte{n.key} },
		Receive: func(from string, m holding.Message) {
			if !n.noPeers.Load() {
				n.driver.Receive(from, m)
			}
		},
	}, registry)
	n.driver = New(Config{
		Node: n.name, Blocks: &client{n.client(), n}, Place: &n.kernel, Targets: &n.kernel, Messages: &sending{link, n}, Mover: n.mover,
	}, registry)
	n.driver.copyTime = cmp.Or(n.copyTime, copyTime)
	ctx, cancel := context.WithCancel(n.t.Context())
	var group sync.WaitGroup
	n.stop = func() {
		cancel()
		group.Wait()
	}
	n.t.Cleanup(n.stop)
	for _, run := range []func(context.Context) error{link.Run, n.driver.Run, n.watch} {
		group.Go(func() {
			if err := run(ctx); err != nil {
				n.t.Error(err)
			}
		})
	}
}

// cutPower ends all on a node.
func (n *node) cutPower() {
	n.noPeers.Store(true)
	n.noAPI.Store(true)
	n.stop()
	for _, id := range n.blocks {
		n.end(id)
	}
}

// watch shows the node what changes at the API server.
func (n *node) watch(ctx context.Context) error {
	driver := n.driver
	block := func(o fakeapi.Object) *v2.AddressBlock {
		b, _ := o.(*v2.AddressBlock)
		return b
	}
	view := n.api.View(map[string]cache.Indexer{blockResource: cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil)},
		func(_ string, before, after fakeapi.Object) { driver.Changed(block(before), block(after)) })
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
			if !n.noAPI.Load() && !n.blind.Load() {
				view.DeliverAll()
			}
		}
	}
}

func (n *node) client() typed.AddressBlockInterface {
	c := fake.NewSimpleClientset()
	c.PrependReactor("*", "*", func(a clienttesting.Action) (bool, runtime.Object, error) { return n.api.React(a) })
	return c.CoilV2().AddressBlocks()
}

// client is what a node knows of the API server. Requests of a node that is cut off end with their time.
type client struct {
	typed.AddressBlockInterface
	node *node
}

func (c *client) List(ctx context.Context, o metav1.ListOptions) (*v2.AddressBlockList, error) {
	if c.node.noAPI.Load() {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return c.AddressBlockInterface.List(ctx, o)
}

func (c *client) Patch(ctx context.Context, name string, pt types.PatchType, data []byte, o metav1.PatchOptions, sub ...string) (*v2.AddressBlock, error) {
	if c.node.noAPI.Load() {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return c.AddressBlockInterface.Patch(ctx, name, pt, data, o, sub...)
}

// sending loses the messages of a node that is cut off.
type sending struct {
	Messages
	node *node
}

func (s *sending) Send(to string, m holding.Message) {
	if s.node.noPeers.Load() {
		return
	}
	if s.node.heard != nil {
		s.node.heard(testkit.Must(holding.Seal(s.node.key, s.node.name, to, m))(s.node.t))
	}
	s.Messages.Send(to, m)
}

// change is a write of a controller to a block.
func (w *world) change(i int, change func(*v2.AddressBlock)) {
	for {
		b := w.block(i)
		version := b.ResourceVersion
		change(b)
		// The server has no precondition here: nobody else may write meanwhile.
		if w.block(i).ResourceVersion == version {
			w.api.Put(blockResource, b)
			return
		}
	}
}

func (w *world) block(i int) *v2.AddressBlock {
	return fakeapi.Find[*v2.AddressBlock](w.api, blockResource, fmt.Sprintf("p-%d", i))
}

func (w *world) node(name string) *node {
	for _, n := range w.nodes {
		if n.name == name {
			return n
		}
	}
	return nil
}

// answering returns the nodes that answer for an address now.
func (w *world) answering(id string) []string {
	var all []string
	for _, n := range w.nodes {
		if spans := n.spans(id); len(spans) > 0 && spans[len(spans)-1].to.After(time.Now()) {
			all = append(all, n.name)
		}
	}
	return all
}

// answeredBy says why a node isn't the holder of an address and the only one that answers for it.
func (w *world) answeredBy(b *v2.AddressBlock, n *node) error {
	who := w.answering(string(b.UID))
	h := b.Floating.Holding
	if h.Holder != n.name || b.Labels[v2.LabelFloatingHolder] != n.name || h.PodUID != n.target(b) || !slices.Equal(who, []string{n.name}) {
		return fmt.Errorf("%s is at %q (label %q, pod %q), and %q answer, not %s", b.Name, h.Holder, b.Labels[v2.LabelFloatingHolder], h.PodUID, who, n.name)
	}
	return nil
}

// target is the pod of a node that has an address: none if it is of Services.
func (n *node) target(b *v2.AddressBlock) types.UID {
	if len(b.Floating.Ports) > 0 {
		return ""
	}
	return types.UID("pod-" + n.name)
}

// answeredByAnother is answeredBy for any node but one: a successor that asks a moment too early leaves an address to the next one.
func (w *world) answeredByAnother(b *v2.AddressBlock, than string) error {
	n := w.node(b.Floating.Holding.Holder)
	if n == nil || n.name == than {
		return fmt.Errorf("%s is at %q", b.Name, b.Floating.Holding.Holder)
	}
	return w.answeredBy(b, n)
}

// settled waits until all addresses are as wanted.
func (w *world) settled(what string, as func(i int, b *v2.AddressBlock) error) {
	w.t.Helper()
	testkit.Eventually(w.t, 20*time.Second, what, func() error {
		var errs []error
		for i := range w.blocks {
			errs = append(errs, as(i, w.block(i)))
		}
		return errors.Join(errs...)
	})
}

// claimed waits until the holders rely on each other, and not on the API server. Nodes that have just started grant nothing.
func (w *world) claimed() {
	w.t.Helper()
	w.settled("all addresses are claimed", func(_ int, b *v2.AddressBlock) error {
		if b.Floating.Holding.Claims == 0 {
			return fmt.Errorf("%+v", b.Floating.Holding)
		}
		return nil
	})
}

// exclusive fails the test if two nodes have answered for an address for longer than a second.
func (w *world) exclusive() {
	for _, id := range w.blocks {
		for i, a := range w.nodes {
			for _, b := range w.nodes[i+1:] {
				for _, x := range a.spans(id) {
					for _, y := range b.spans(id) {
						from, to := later(x.from, y.from), earlier(x.to, y.to)
						if both := to.Sub(from); both > time.Second {
							w.t.Errorf("%s and %s answered at once for %s for %s", a.name, b.name, id, both)
						}
					}
				}
			}
		}
	}
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// silence returns the longest time since a moment in which nobody has answered for an address.
func (w *world) silence(id string, since time.Time) time.Duration {
	var all []span
	for _, n := range w.nodes {
		all = append(all, n.spans(id)...)
	}
	slices.SortFunc(all, func(a, b span) int { return a.from.Compare(b.from) })
	longest, end := time.Duration(0), since
	for _, s := range all {
		longest = max(longest, s.from.Sub(end))
		end = later(end, s.to)
	}
	return max(longest, time.Since(end))
}
