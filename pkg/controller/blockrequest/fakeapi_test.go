package blockrequest

import (
	"errors"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	corefake "k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"

	"github.com/coil-net/coil/generated/clientset/versioned/fake"
	"github.com/coil-net/coil/generated/informers/externalversions"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ledger"
)

// fakeAPI is an API server in memory for pools, blocks and requests, with resource
// versions, preconditions and finalizers, which client-go's fake doesn't have, and
// with faults. It keeps all events, so that each cache can lag as it likes.
type fakeAPI struct {
	t        *testing.T
	mu       sync.Mutex
	pools    map[string]*v2.AddressPool
	blocks   map[string]*v2.AddressBlock
	requests map[string]*v2.BlockRequest
	revision int
	log      []event
	calls    map[string]int // by verb and resource
	// fault may fail a call before it is done, or after (its answer is lost).
	fault func(verb, resource string) (before, after error)
}

// event is a change of a block or a request; obj is nil for a deletion.
type event struct {
	name string
	obj  metav1.Object
	kind string
}

var errLost = errors.New("the connection was lost")

func newFakeAPI(t *testing.T) *fakeAPI {
	return &fakeAPI{
		t: t, pools: map[string]*v2.AddressPool{}, blocks: map[string]*v2.AddressBlock{},
		requests: map[string]*v2.BlockRequest{}, calls: map[string]int{},
	}
}

func (a *fakeAPI) stamp(m *metav1.ObjectMeta) {
	a.revision++
	m.ResourceVersion = strconv.Itoa(a.revision)
	if m.UID == "" {
		m.UID = types.UID(fmt.Sprintf("uid-%s-%d", m.Name, a.revision))
		m.CreationTimestamp = metav1.NewTime(time.Unix(int64(a.revision), 0))
	}
}

func (a *fakeAPI) addPool(p *v2.AddressPool) *v2.AddressPool {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.stamp(&p.ObjectMeta)
	a.pools[p.Name] = p
	return p
}

func (a *fakeAPI) addRequest(name, node, pool string) *v2.BlockRequest {
	a.mu.Lock()
	defer a.mu.Unlock()
	r := &v2.BlockRequest{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v2.BlockRequestSpec{NodeName: node, PoolName: pool}}
	a.stamp(&r.ObjectMeta)
	a.putRequest(r)
	return r
}

func (a *fakeAPI) putRequest(r *v2.BlockRequest) {
	a.requests[r.Name] = r
	a.log = append(a.log, event{r.Name, r.DeepCopy(), "request"})
}

func (a *fakeAPI) putBlock(b *v2.AddressBlock) {
	a.blocks[b.Name] = b
	a.log = append(a.log, event{b.Name, b.DeepCopy(), "block"})
}

func (a *fakeAPI) addBlock(b *v2.AddressBlock) *v2.AddressBlock {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.stamp(&b.ObjectMeta)
	a.putBlock(b)
	return b
}

// dropRequest deletes a request as coild does once it is answered.
func (a *fakeAPI) dropRequest(name string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.requests, name)
	a.log = append(a.log, event{name, nil, "request"})
}

// dropBlock removes a block and its finalizer as coild does.
func (a *fakeAPI) dropBlock(name string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.blocks, name)
	a.log = append(a.log, event{name, nil, "block"})
}

var (
	poolResource    = v2.Resource("addresspools")
	blockResource   = v2.Resource("addressblocks")
	requestResource = v2.Resource("blockrequests")
)

func (a *fakeAPI) react(action clienttesting.Action) (bool, runtime.Object, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	verb, resource := action.GetVerb(), action.GetResource().Resource
	a.calls[verb+" "+resource]++
	var before, after error
	if a.fault != nil {
		before, after = a.fault(verb, resource)
	}
	if before != nil {
		return true, nil, before
	}
	obj, err := a.do(action)
	if err == nil && after != nil {
		return true, nil, after
	}
	return true, obj, err
}

func (a *fakeAPI) do(action clienttesting.Action) (runtime.Object, error) {
	switch act := action.(type) {
	case clienttesting.CreateActionImpl:
		b := act.GetObject().(*v2.AddressBlock).DeepCopy()
		if _, ok := a.blocks[b.Name]; ok {
			return nil, apierrors.NewAlreadyExists(blockResource, b.Name)
		}
		a.stamp(&b.ObjectMeta)
		a.putBlock(b)
		return b.DeepCopy(), nil
	case clienttesting.UpdateActionImpl:
		r := act.GetObject().(*v2.BlockRequest).DeepCopy()
		now, ok := a.requests[r.Name]
		if !ok {
			return nil, apierrors.NewNotFound(requestResource, r.Name)
		}
		if now.UID != r.UID || now.ResourceVersion != r.ResourceVersion {
			return nil, apierrors.NewConflict(requestResource, r.Name, errors.New("it was changed"))
		}
		a.stamp(&r.ObjectMeta)
		a.putRequest(r)
		return r.DeepCopy(), nil
	case clienttesting.DeleteActionImpl:
		return nil, a.deleteBlock(act)
	case clienttesting.GetActionImpl:
		if action.GetResource().Resource == poolResource.Resource {
			if p, ok := a.pools[act.GetName()]; ok {
				return p.DeepCopy(), nil
			}
			return nil, apierrors.NewNotFound(poolResource, act.GetName())
		}
		if b, ok := a.blocks[act.GetName()]; ok {
			return b.DeepCopy(), nil
		}
		return nil, apierrors.NewNotFound(blockResource, act.GetName())
	case clienttesting.ListActionImpl:
		l := &v2.AddressBlockList{}
		for _, b := range a.blocks {
			if act.GetListRestrictions().Labels.Matches(labels.Set(b.Labels)) {
				l.Items = append(l.Items, *b.DeepCopy())
			}
		}
		return l, nil
	}
	a.t.Errorf("unexpected call %s %s", action.GetVerb(), action.GetResource().Resource)
	return nil, errors.New("unexpected call")
}

func (a *fakeAPI) deleteBlock(act clienttesting.DeleteActionImpl) error {
	b, ok := a.blocks[act.Name]
	if !ok {
		return apierrors.NewNotFound(blockResource, act.Name)
	}
	pre := act.DeleteOptions.Preconditions
	if pre == nil || pre.UID == nil || pre.ResourceVersion == nil {
		a.t.Errorf("block %s is deleted without preconditions", act.Name)
	} else if *pre.UID != b.UID || *pre.ResourceVersion != b.ResourceVersion {
		return apierrors.NewConflict(blockResource, act.Name, errors.New("it was changed"))
	}
	b = b.DeepCopy()
	b.DeletionTimestamp = new(metav1.Now())
	a.stamp(&b.ObjectMeta)
	a.putBlock(b)
	return nil
}

// replica is a controller whose caches show what deliver gave it.
type replica struct {
	*Controller
	api       *fakeAPI
	pools     cache.Indexer
	nodes     cache.Indexer
	delivered int
	events    *events.FakeRecorder
}

// newReplica returns a controller whose caches show the first part of the log, as
// those of a process do that has begun to lead then.
func newReplica(t *testing.T, api *fakeAPI, delivered int, nodes ...*corev1.Node) *replica {
	t.Helper()
	client := fake.NewSimpleClientset()
	client.PrependReactor("*", "*", api.react)
	core := corefake.NewSimpleClientset()
	coilInformers := externalversions.NewSharedInformerFactory(client, 0).Coil().V2()
	nodeInformer := informers.NewSharedInformerFactory(core, 0).Core().V1().Nodes()
	recorder := events.NewFakeRecorder(10000)
	r := &replica{api: api, events: recorder}
	c, err := New(Config{
		Ledger: ledger.New(func() time.Time { return r.now() }), Coil: client, Core: core, Recorder: recorder, Nodes: nodeInformer,
		Requests: coilInformers.BlockRequests(), Blocks: coilInformers.AddressBlocks(), Pools: coilInformers.AddressPools(),
	})
	if err != nil {
		t.Fatal(err)
	}
	c.led.Store(new(c.now()))
	r.Controller = c
	r.pools, r.nodes = coilInformers.AddressPools().Informer().GetIndexer(), nodeInformer.Informer().GetIndexer()
	for _, n := range nodes {
		if _, err := core.CoreV1().Nodes().Create(t.Context(), n, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		r.add(t, r.nodes, n)
	}
	for _, p := range api.pools {
		r.add(t, r.pools, p.DeepCopy())
	}
	for r.delivered < delivered {
		r.deliver(t)
	}
	return r
}

func (r *replica) add(t *testing.T, to cache.Indexer, obj any) {
	t.Helper()
	if err := to.Add(obj); err != nil {
		t.Fatal(err)
	}
}

// deliver shows the caches one more event; false if there is none.
func (r *replica) deliver(t *testing.T) bool {
	t.Helper()
	r.api.mu.Lock()
	defer r.api.mu.Unlock()
	if r.delivered == len(r.api.log) {
		return false
	}
	e := r.api.log[r.delivered]
	r.delivered++
	to := r.blocks.Indexer
	if e.kind == "request" {
		to = r.requests.Indexer
	}
	var err error
	if e.obj == nil {
		var old any
		old, _, err = to.GetByKey(e.name)
		if err == nil && old != nil {
			err = to.Delete(old)
		}
		if e.kind == "block" {
			r.ledger.Miss(e.name)
		}
	} else {
		err = to.Update(e.obj)
		if e.kind == "block" {
			r.blockChanged(nil, e.obj.(*v2.AddressBlock))
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	return true
}

func (r *replica) deliverAll(t *testing.T) {
	for r.deliver(t) {
	}
}

func testNode(name string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID("uid-" + name)}}
}
