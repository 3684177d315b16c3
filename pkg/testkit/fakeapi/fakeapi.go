// Package fakeapi is an API server in memory for tests of controllers: with resource versions, preconditions, finalizers and the status as
// a subresource, which client-go's fake hasn't, and with faults. It keeps all events, so that each cache can lag as it likes.
//
// It must not know any controller, nor what objects are for.
package fakeapi

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
)

// ErrLost is for a Fault: the connection is lost.
var ErrLost = errors.New("the connection was lost")

// Object is an object of the API.
type Object interface {
	metav1.Object
	runtime.Object
}

// As is an object of a type; nil if there is no object, or it is of another one.
func As[T any](o Object) *T {
	p, _ := any(o).(*T)
	return p
}

// Last is an object after a change or, if it is gone, before it.
func Last[T any](before, after Object) *T {
	if p := As[T](after); p != nil {
		return p
	}
	return As[T](before)
}

// Server has objects of all kinds.
type Server struct {
	// Fault may fail a call before it is done, or after, so that its answer is lost. It may be nil. It is called with the server locked.
	Fault func(verb, resource string) (before, after error)
	// Prune drops fields of an object that is made by a call, as an API server does whose definition hasn't got them. It may be nil.
	Prune func(Object)

	t        *testing.T
	lists    map[string]runtime.Object // empty ones, by resource
	mu       sync.Mutex
	objects  map[key]Object
	revision int
	log      []event
	calls    map[string]int
}

// key names an object: its resource, such as addressblocks, and namespace/name or, without a namespace, name.
type key struct{ resource, name string }

// event is a change of an object, which is nil when it is gone.
type event struct {
	key
	obj Object
}

// New returns a server without objects. lists has an empty list of each resource that may be listed.
func New(t *testing.T, lists map[string]runtime.Object) *Server {
	return &Server{t: t, lists: lists, objects: map[key]Object{}, calls: map[string]int{}}
}

func named(namespace, name string) string {
	if namespace == "" {
		return name
	}
	return namespace + "/" + name
}

// Put makes an object what it is now, and tells of it. It sets the UID and the time of creation of a new one.
func (s *Server) Put(resource string, o Object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.put(resource, o)
}

// put must be called with mu held.
func (s *Server) put(resource string, o Object) {
	s.revision++
	o.SetResourceVersion(strconv.Itoa(s.revision))
	if o.GetUID() == "" {
		o.SetUID(types.UID(fmt.Sprintf("uid-%s-%d", o.GetName(), s.revision)))
		o.SetCreationTimestamp(metav1.NewTime(time.Unix(int64(s.revision), 0)))
	}
	k := key{resource, named(o.GetNamespace(), o.GetName())}
	s.objects[k] = o
	s.log = append(s.log, event{k, o.DeepCopyObject().(Object)})
}

// Drop removes an object at once, whatever finalizers it has.
func (s *Server) Drop(resource, name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drop(key{resource, name})
}

// drop must be called with mu held.
func (s *Server) drop(k key) {
	if s.objects[k] != nil {
		delete(s.objects, k)
		s.log = append(s.log, event{k, nil})
	}
}

// Find returns a copy of an object, by namespace/name, or nil.
func Find[T Object](s *Server, resource, name string) (none T) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if o := s.objects[key{resource, name}]; o != nil {
		return o.DeepCopyObject().(T)
	}
	return none
}

// All returns copies of the objects of a resource, sorted by name.
func All[T Object](s *Server, resource string) []T {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []T
	for _, k := range s.keys(resource) {
		all = append(all, s.objects[k].DeepCopyObject().(T))
	}
	return all
}

// keys must be called with mu held.
func (s *Server) keys(resource string) []key {
	all := slices.DeleteFunc(slices.Collect(maps.Keys(s.objects)), func(k key) bool { return k.resource != resource })
	slices.SortFunc(all, func(a, b key) int { return strings.Compare(a.name, b.name) })
	return all
}

// Calls returns how often it was called, by verb and resource, such as "create addressblocks".
func (s *Server) Calls() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.calls)
}

// Events returns how many changes there were.
func (s *Server) Events() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.log)
}

// React is a reactor of client-go's fake clients.
func (s *Server) React(action clienttesting.Action) (bool, runtime.Object, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	verb, resource := action.GetVerb(), action.GetResource().Resource
	s.calls[verb+" "+resource]++
	var before, after error
	if s.Fault != nil {
		before, after = s.Fault(verb, resource)
	}
	if before != nil {
		return true, nil, before
	}
	obj, err := s.do(action)
	if err == nil && after != nil {
		return true, nil, after
	}
	return true, obj, err
}

// do must be called with mu held.
func (s *Server) do(action clienttesting.Action) (runtime.Object, error) {
	resource := action.GetResource().Resource
	group := schema.GroupResource{Group: action.GetResource().Group, Resource: resource}
	switch act := action.(type) {
	case clienttesting.CreateActionImpl:
		o := act.GetObject().DeepCopyObject().(Object)
		if k := (key{resource, named(act.GetNamespace(), o.GetName())}); s.objects[k] != nil {
			return nil, apierrors.NewAlreadyExists(group, o.GetName())
		}
		if s.Prune != nil {
			s.Prune(o)
		}
		s.put(resource, o)
		return o.DeepCopyObject(), nil
	case clienttesting.GetActionImpl:
		return s.get(group, act.GetNamespace(), act.GetName())
	case clienttesting.ListActionImpl:
		return s.list(resource, act.GetNamespace(), act.GetListRestrictions().Labels)
	case clienttesting.UpdateActionImpl:
		o := act.GetObject().(Object)
		return s.change(group, o.GetNamespace(), o.GetName(), o.GetUID(), o.GetResourceVersion(), func(have map[string]any) {
			want := fields(s.t, o)
			if act.GetSubresource() == "status" {
				have["status"] = want["status"]
				return
			}
			clear(have)
			maps.Copy(have, want)
		})
	case clienttesting.PatchActionImpl:
		if act.GetPatchType() != types.MergePatchType {
			break
		}
		patch := map[string]any{}
		if err := json.Unmarshal(act.GetPatch(), &patch); err != nil {
			return nil, err
		}
		var pre metav1.ObjectMeta
		metadata, _ := json.Marshal(patch["metadata"])
		if err := json.Unmarshal(metadata, &pre); err != nil {
			return nil, err
		}
		return s.change(group, act.GetNamespace(), act.GetName(), pre.UID, pre.ResourceVersion, func(have map[string]any) { merge(have, patch) })
	case clienttesting.DeleteActionImpl:
		return nil, s.delete(group, act)
	}
	s.t.Errorf("unexpected call %s %s", action.GetVerb(), resource)
	return nil, errors.New("unexpected call")
}

func (s *Server) get(group schema.GroupResource, namespace, name string) (Object, error) {
	if o := s.objects[key{group.Resource, named(namespace, name)}]; o != nil {
		return o.DeepCopyObject().(Object), nil
	}
	return nil, apierrors.NewNotFound(group, name)
}

// list returns the objects of a namespace, or of all namespaces.
func (s *Server) list(resource, namespace string, selector labels.Selector) (runtime.Object, error) {
	list := s.lists[resource].DeepCopyObject()
	var items []runtime.Object
	for _, k := range s.keys(resource) {
		if o := s.objects[k]; (namespace == "" || o.GetNamespace() == namespace) && selector.Matches(labels.Set(o.GetLabels())) {
			items = append(items, s.objects[k].DeepCopyObject())
		}
	}
	of, err := meta.ListAccessor(list)
	if err != nil {
		return nil, err
	}
	of.SetResourceVersion(strconv.Itoa(s.revision))
	return list, meta.SetList(list, items)
}

// change changes an object that has the UID and the resource version; both must be given.
func (s *Server) change(group schema.GroupResource, namespace, name string, uid types.UID, version string, with func(map[string]any)) (Object, error) {
	have, err := s.get(group, namespace, name)
	if err != nil {
		return nil, err
	}
	if uid == "" || version == "" {
		s.t.Errorf("%s %s is changed without preconditions", group.Resource, name)
	}
	if have.GetUID() != uid || have.GetResourceVersion() != version {
		return nil, apierrors.NewConflict(group, name, errors.New("it was changed"))
	}
	m := fields(s.t, have)
	with(m)
	after := reflect.New(reflect.TypeOf(have).Elem()).Interface().(Object)
	text, err := json.Marshal(m)
	if err == nil {
		err = json.Unmarshal(text, after)
	}
	if err != nil {
		return nil, err
	}
	s.put(group.Resource, after)
	if after.GetDeletionTimestamp() != nil && len(after.GetFinalizers()) == 0 {
		s.drop(key{group.Resource, named(namespace, name)})
	}
	return after.DeepCopyObject().(Object), nil
}

func (s *Server) delete(group schema.GroupResource, act clienttesting.DeleteActionImpl) error {
	have, err := s.get(group, act.GetNamespace(), act.Name)
	if err != nil {
		return err
	}
	pre := act.DeleteOptions.Preconditions
	if pre == nil || pre.UID == nil || pre.ResourceVersion == nil {
		s.t.Errorf("%s %s is deleted without preconditions", group.Resource, act.Name)
	} else if *pre.UID != have.GetUID() || *pre.ResourceVersion != have.GetResourceVersion() {
		return apierrors.NewConflict(group, act.Name, errors.New("it was changed"))
	}
	if len(have.GetFinalizers()) == 0 {
		s.drop(key{group.Resource, named(act.GetNamespace(), act.Name)})
	} else if have.GetDeletionTimestamp() == nil {
		have.SetDeletionTimestamp(new(metav1.Now()))
		s.put(group.Resource, have)
	}
	return nil
}

// fields are those of an object, as JSON has them.
func fields(t *testing.T, o Object) map[string]any {
	m := map[string]any{}
	text, err := json.Marshal(o)
	if err == nil {
		err = json.Unmarshal(text, &m)
	}
	if err != nil {
		t.Errorf("%T %s: %v", o, o.GetName(), err)
	}
	return m
}

// merge applies a JSON merge patch (RFC 7386).
func merge(have, patch map[string]any) {
	for k, v := range patch {
		inner, ok := v.(map[string]any)
		switch {
		case v == nil:
			delete(have, k)
		case ok:
			m, _ := have[k].(map[string]any)
			if m == nil {
				m = map[string]any{}
			}
			merge(m, inner)
			have[k] = m
		default:
			have[k] = v
		}
	}
}

// View is what the caches of one process show: a part of the events.
type View struct {
	server    *Server
	caches    map[string]cache.Indexer
	changed   func(resource string, before, after Object)
	delivered int
	// ahead is up to which event a cache shows all that are of its resource, where that is further than delivered.
	ahead map[string]int
}

// View returns caches, by resource, that show nothing yet. changed is told of each event that they show; it may be nil.
func (s *Server) View(caches map[string]cache.Indexer, changed func(resource string, before, after Object)) *View {
	return &View{server: s, caches: caches, changed: changed, ahead: map[string]int{}}
}

// Behind returns how many events the caches don't show yet.
func (v *View) Behind() int {
	return v.server.Events() - v.delivered
}

// Deliver shows n more events, or as many as there are, in the order in which they happened.
func (v *View) Deliver(n int) {
	for range min(n, v.Behind()) {
		e := v.event(v.delivered)
		v.delivered++
		if v.delivered > v.ahead[e.resource] {
			v.show(e)
		}
	}
}

// DeliverOf shows all events of a resource: its cache is ahead of the others, for each one has a watch of its own.
func (v *View) DeliverOf(resource string) {
	for v.ahead[resource] = max(v.ahead[resource], v.delivered); v.ahead[resource] < v.server.Events(); {
		e := v.event(v.ahead[resource])
		v.ahead[resource]++
		if e.resource == resource {
			v.show(e)
		}
	}
}

// event returns an event by its number.
func (v *View) event(n int) event {
	v.server.mu.Lock()
	defer v.server.mu.Unlock()
	return v.server.log[n]
}

// show has the cache show an event.
func (v *View) show(e event) {
	to := v.caches[e.resource]
	if to == nil {
		return
	}
	old, _, err := to.GetByKey(e.name)
	before, _ := old.(Object)
	switch {
	case err != nil:
	case e.obj != nil:
		err = to.Update(e.obj)
	case before != nil:
		err = to.Delete(before)
	}
	if err != nil {
		v.server.t.Fatal(err)
	}
	if v.changed != nil {
		v.changed(e.resource, before, e.obj)
	}
}

// DeliverAll shows all events.
func (v *View) DeliverAll() {
	for n := v.Behind(); n > 0; n = v.Behind() {
		v.Deliver(n)
	}
}
