package egress

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// egressName is that of the Egress of each namespace.
const egressName = "nat"

// api is as much of an API server as a router sees: it lists and watches an Egress and its
// EndpointSlices. kube-apiserver takes minutes to start in a machine that emulates its
// processor; with it, routers are tested where whole clusters are.
type api struct {
	port string

	mu      sync.Mutex
	version int
	objects map[string]object
	events  []event
	news    chan struct{} // is closed when there are more events
}

type object interface {
	runtime.Object
	metav1.Object
}

// event is a change of an object, whose version is the object's.
type event struct {
	kind   watch.EventType
	object object
}

// newAPI starts one at all addresses of the machine's own namespace.
func newAPI(t *testing.T) *api {
	t.Helper()
	l := testkit.Must(net.Listen("tcp", ":0"))(t)
	a := &api{port: fmt.Sprint(l.Addr().(*net.TCPAddr).Port), objects: map[string]object{}, news: make(chan struct{})}
	server := &http.Server{Handler: a}
	go server.Serve(l)
	t.Cleanup(func() { server.Close() })
	return a
}

// kubeconfig writes a file that leads to the API server.
func (a *api) kubeconfig(t *testing.T, path string, addr string) {
	t.Helper()
	k := clientcmdapi.NewConfig()
	k.Clusters["api"] = &clientcmdapi.Cluster{Server: "http://" + net.JoinHostPort(addr, a.port)}
	k.Contexts["api"] = &clientcmdapi.Context{Cluster: "api"}
	k.CurrentContext = "api"
	testkit.Check(t, clientcmd.WriteToFile(*k, path))
}

// set makes an object, or changes the one of its name, which counts as a change of its spec.
func (a *api) set(o object) {
	a.mu.Lock()
	defer a.mu.Unlock()
	kind := watch.Added
	if old := a.objects[key(o)]; old != nil {
		kind = watch.Modified
		o.SetGeneration(old.GetGeneration() + 1)
	}
	a.record(kind, o)
	a.objects[key(o)] = o
}

// remove deletes an object.
func (a *api) remove(o object) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.objects, key(o))
	a.record(watch.Deleted, o)
}

func (a *api) record(kind watch.EventType, o object) {
	a.version++
	o.SetResourceVersion(strconv.Itoa(a.version))
	a.events = append(a.events, event{kind, o})
	close(a.news)
	a.news = make(chan struct{})
}

func key(o object) string { return fmt.Sprintf("%T/%s/%s", o, o.GetNamespace(), o.GetName()) }

// ServeHTTP answers lists and watches.
func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	selector, err := labels.Parse(r.URL.Query().Get("labelSelector"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	of := func(o object) bool {
		_, slice := o.(*discoveryv1.EndpointSlice)
		return selector.Matches(labels.Set(o.GetLabels())) && strings.Contains(r.URL.Path, "/namespaces/"+o.GetNamespace()+"/") && slice == strings.HasSuffix(r.URL.Path, "/endpointslices")
	}
	w.Header().Set("Content-Type", "application/json")
	a.mu.Lock()
	next := len(a.events)
	var items []object
	for _, o := range a.objects {
		if of(o) {
			items = append(items, o)
		}
	}
	version := strconv.Itoa(a.version)
	a.mu.Unlock()
	if r.URL.Query().Get("watch") == "" {
		_ = json.NewEncoder(w).Encode(map[string]any{
			"kind": "List", "apiVersion": "v1", "metadata": map[string]any{"resourceVersion": version}, "items": append([]object{}, items...),
		})
		return
	}
	send := func(kind watch.EventType, o any) {
		_ = json.NewEncoder(w).Encode(map[string]any{"type": kind, "object": o})
		w.(http.Flusher).Flush()
	}
	if r.URL.Query().Get("sendInitialEvents") == "true" {
		for _, o := range items {
			send(watch.Added, o)
		}
		kind, group := "Egress", v2.GroupVersion.String()
		if strings.HasSuffix(r.URL.Path, "/endpointslices") {
			kind, group = "EndpointSlice", discoveryv1.SchemeGroupVersion.String()
		}
		send(watch.Bookmark, map[string]any{"kind": kind, "apiVersion": group, "metadata": map[string]any{
			"resourceVersion": version, "annotations": map[string]string{metav1.InitialEventsAnnotationKey: "true"},
		}})
	} else if since, err := strconv.Atoi(r.URL.Query().Get("resourceVersion")); err == nil {
		next = min(next, since) // each event has a version of its own
	}
	w.(http.Flusher).Flush()
	for {
		a.mu.Lock()
		events, news := a.events[next:], a.news
		next = len(a.events)
		a.mu.Unlock()
		for _, e := range events {
			if of(e.object) {
				send(e.kind, e.object)
			}
		}
		select {
		case <-news:
		case <-r.Context().Done():
			return
		}
	}
}

// setEgress makes the Egress of a namespace, or changes it. A client may take all that the router has.
func (a *api) setEgress(namespace string, auto bool, destinations ...string) {
	a.set(&v2.Egress{
		TypeMeta:   metav1.TypeMeta{Kind: "Egress", APIVersion: v2.GroupVersion.String()},
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: egressName},
		Spec:       v2.EgressSpec{Destinations: destinations, Replicas: 1, FouSourcePortAuto: auto, MaxConnectionsPerClient: new(int32)},
	})
}

// member is a pod that is a client, by its UID and one address.
type member struct {
	uid  string
	addr netip.Addr
}

// publish makes the EndpointSlices of a namespace list these clients, as the controller does:
// at most 1000 in each. Every second client is one by a policy. The time returned is that of the first write.
func (a *api) publish(namespace string, members ...member) time.Time {
	const most = 1000
	lists := map[string]*discoveryv1.EndpointSlice{}
	count := map[string]int{}
	for _, m := range members {
		kind := discoveryv1.AddressTypeIPv6
		if m.addr.Is4() {
			kind = discoveryv1.AddressTypeIPv4
		}
		label, list := v2.LabelEgress, "clients"
		if m.addr.As16()[15]%2 == 1 { // the same client always by the same list
			label, list = v2.LabelPolicyEgress, "policy"
		}
		prefix := fmt.Sprintf("%s-%s-%s", egressName, list, strings.ToLower(string(kind)))
		name := fmt.Sprintf("%s-%d", prefix, count[prefix]/most)
		count[prefix]++
		s := lists[name]
		if s == nil {
			s = &discoveryv1.EndpointSlice{
				TypeMeta: metav1.TypeMeta{Kind: "EndpointSlice", APIVersion: discoveryv1.SchemeGroupVersion.String()},
				ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{
					label: egressName, corev1.IsHeadlessService: "", discoveryv1.LabelManagedBy: "coil-egress-controller",
				}}, AddressType: kind,
			}
			lists[name] = s
		}
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{m.addr.String()}, Conditions: discoveryv1.EndpointConditions{Ready: new(true)},
			TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: "clients", Name: "pod-" + m.uid, UID: types.UID(m.uid)},
		})
	}
	a.mu.Lock()
	var gone []object
	for _, o := range a.objects {
		s, ok := o.(*discoveryv1.EndpointSlice)
		if !ok || s.Namespace != namespace {
			continue
		}
		switch want := lists[s.Name]; {
		case want == nil:
			gone = append(gone, s.DeepCopy())
		case reflect.DeepEqual(s.Endpoints, want.Endpoints):
			delete(lists, s.Name) // what doesn't change isn't written
		}
	}
	a.mu.Unlock()
	start := time.Now()
	for _, s := range lists {
		a.set(s)
	}
	for _, o := range gone {
		a.remove(o)
	}
	return start
}

// command runs a program of the machine and returns what it prints.
func command(t *testing.T, args ...string) string {
	t.Helper()
	return testkit.Must(machine.Run(args[0], args[1:]...))(t)
}

// at is an address with a port.
func at(a netip.Addr, port string) string { return net.JoinHostPort(a.String(), port) }
