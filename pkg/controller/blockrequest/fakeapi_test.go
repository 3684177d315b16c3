package blockrequest

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	corefake "k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"

	"github.com/coil-net/coil/generated/clientset/versioned/fake"
	"github.com/coil-net/coil/generated/informers/externalversions"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ledger"
	"github.com/coil-net/coil/pkg/testkit/fakeapi"
)

const (
	poolResource    = "addresspools"
	blockResource   = "addressblocks"
	requestResource = "blockrequests"
)

// fakeAPI has pools, blocks and requests.
type fakeAPI struct{ *fakeapi.Server }

func newFakeAPI(t *testing.T) fakeAPI {
	return fakeAPI{fakeapi.New(t, map[string]runtime.Object{blockResource: &v2.AddressBlockList{}})}
}

func (a fakeAPI) addPool(p *v2.AddressPool) *v2.AddressPool {
	a.Put(poolResource, p)
	return p
}

func (a fakeAPI) changePool(change func(*v2.AddressPool)) {
	p := fakeapi.Find[*v2.AddressPool](a.Server, poolResource, "default")
	change(p)
	a.Put(poolResource, p)
}

func (a fakeAPI) addRequest(name, node, pool string) *v2.BlockRequest {
	r := &v2.BlockRequest{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v2.BlockRequestSpec{NodeName: node, PoolName: pool}}
	a.putRequest(r)
	return r
}

func (a fakeAPI) putRequest(r *v2.BlockRequest) { a.Put(requestResource, r) }

func (a fakeAPI) addBlock(b *v2.AddressBlock) *v2.AddressBlock {
	a.Put(blockResource, b)
	return b
}

// dropRequest deletes a request as coild does once it is answered.
func (a fakeAPI) dropRequest(name string) { a.Drop(requestResource, name) }

// dropBlock removes a block and its finalizer as coild does.
func (a fakeAPI) dropBlock(name string) { a.Drop(blockResource, name) }

func (a fakeAPI) pools() map[string]*v2.AddressPool {
	return byName(fakeapi.All[*v2.AddressPool](a.Server, poolResource))
}

func (a fakeAPI) blocks() map[string]*v2.AddressBlock {
	return byName(fakeapi.All[*v2.AddressBlock](a.Server, blockResource))
}

func (a fakeAPI) requests() map[string]*v2.BlockRequest {
	return byName(fakeapi.All[*v2.BlockRequest](a.Server, requestResource))
}

func byName[T metav1.Object](all []T) map[string]T {
	m := map[string]T{}
	for _, o := range all {
		m[o.GetName()] = o
	}
	return m
}

// replica is a controller whose caches show what its View gave them.
type replica struct {
	*Controller
	*fakeapi.View
	api    fakeAPI
	pools  cache.Indexer
	nodes  cache.Indexer
	events *events.FakeRecorder
}

// newReplica returns a controller whose caches show the pools and the first part of the events, as those of a process do that
// has begun to lead then.
func newReplica(t *testing.T, api fakeAPI, delivered int, nodes ...*corev1.Node) *replica {
	t.Helper()
	client := fake.NewSimpleClientset()
	client.PrependReactor("*", "*", api.React)
	core := corefake.NewSimpleClientset()
	coil := externalversions.NewSharedInformerFactory(client, 0).Coil().V2()
	nodeInformer := informers.NewSharedInformerFactory(core, 0).Core().V1().Nodes()
	r := &replica{api: api, events: events.NewFakeRecorder(10000)}
	c, err := New(Config{
		Ledger: ledger.New(func() time.Time { return r.now() }), Coil: client, Core: core, Recorder: r.events, Nodes: nodeInformer,
		Requests: coil.BlockRequests(), Blocks: coil.AddressBlocks(), Pools: coil.AddressPools(),
	})
	if err != nil {
		t.Fatal(err)
	}
	c.led.Store(new(c.now()))
	r.Controller = c
	r.pools, r.nodes = coil.AddressPools().Informer().GetIndexer(), nodeInformer.Informer().GetIndexer()
	for _, n := range nodes {
		if _, err := core.CoreV1().Nodes().Create(t.Context(), n, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		r.add(t, r.nodes, n)
	}
	for _, p := range api.pools() {
		r.add(t, r.pools, p)
	}
	r.View = api.View(map[string]cache.Indexer{
		blockResource: coil.AddressBlocks().Informer().GetIndexer(), requestResource: coil.BlockRequests().Informer().GetIndexer(),
	}, func(resource string, before, after fakeapi.Object) {
		old, _ := before.(*v2.AddressBlock)
		b, _ := after.(*v2.AddressBlock)
		if old != nil || b != nil {
			r.blockChanged(old, b)
		}
	})
	r.Deliver(delivered)
	return r
}

func (r *replica) add(t *testing.T, to cache.Indexer, obj any) {
	t.Helper()
	if err := to.Add(obj); err != nil {
		t.Fatal(err)
	}
}

func testNode(name string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID("uid-" + name)}}
}
