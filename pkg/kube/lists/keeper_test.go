package lists

import (
	"errors"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	corefake "k8s.io/client-go/kubernetes/fake"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube/object"
	"github.com/coil-net/coil/pkg/plan/egress"
	"github.com/coil-net/coil/pkg/testkit/fakeapi"
)

const resource = "endpointslices"

var (
	listKey = types.NamespacedName{Namespace: "internet", Name: "nat"}
	nat     = &v2.Egress{ObjectMeta: metav1.ObjectMeta{Namespace: "internet", Name: "nat", UID: "nat"}}
	client  = egress.Client{Pod: types.NamespacedName{Namespace: "apps", Name: "a"}, UID: "a", Addr: netip.MustParseAddr("10.0.0.1")}
)

func newKeeper(t *testing.T) (*Keeper, *fakeapi.Server) {
	s := fakeapi.New(t, nil)
	core := corefake.NewSimpleClientset()
	core.PrependReactor("*", "*", s.React)
	return New(core.DiscoveryV1(), 0), s
}

// A slice that the cache doesn't have, because somebody changed what it is known by, is taken back. One of somebody else isn't.
func TestSlicesAreTakenBack(t *testing.T) {
	k, s := newKeeper(t)
	if err := k.Write(t.Context(), listKey, nil, egress.ListOf(nat).With([]egress.Client{client})); err != nil {
		t.Fatal(err)
	}
	const name = "internet/nat-clients-ipv4-0"
	spoiled := fakeapi.Find[*discoveryv1.EndpointSlice](s, resource, name)
	spoiled.Labels, spoiled.Endpoints = nil, nil
	s.Put(resource, spoiled)
	if err := k.Write(t.Context(), listKey, nil, egress.ListOf(nat).With([]egress.Client{client})); err != nil {
		t.Error(err)
	}
	if got := fakeapi.Find[*discoveryv1.EndpointSlice](s, resource, name); got.Labels[v2.LabelEgress] != "nat" || len(got.Endpoints) != 1 {
		t.Errorf("%+v", got)
	}
	for what, change := range map[string]func(*discoveryv1.EndpointSlice){
		"owner": func(o *discoveryv1.EndpointSlice) { o.OwnerReferences[0].UID = "other" },
		"none":  func(o *discoveryv1.EndpointSlice) { o.OwnerReferences = nil },
		"kind":  func(o *discoveryv1.EndpointSlice) { o.AddressType = discoveryv1.AddressTypeFQDN },
	} {
		theirs := fakeapi.Find[*discoveryv1.EndpointSlice](s, resource, name)
		change(theirs)
		s.Put(resource, theirs)
		err := k.Write(t.Context(), listKey, nil, egress.ListOf(nat).With([]egress.Client{client}))
		if foreign := (*object.ForeignError)(nil); !errors.As(err, &foreign) {
			t.Errorf("%s: error %v", what, err)
		}
		s.Drop(resource, name)
		if err := k.Write(t.Context(), listKey, nil, egress.ListOf(nat).With([]egress.Client{client})); err != nil {
			t.Fatal(err)
		}
	}
}

// Slices are deleted at once, but not while the cache doesn't show what was written of them.
func TestClear(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k, s := newKeeper(t)
		if err := k.Write(t.Context(), listKey, nil, egress.ListOf(nat).With([]egress.Client{client})); err != nil {
			t.Fatal(err)
		}
		if err := k.Ready(listKey, nil); err == nil {
			t.Error("it writes again at once")
		}
		time.Sleep(Collect)
		if err := k.Ready(listKey, nil); err == nil {
			t.Error("it writes before the cache shows the write")
		}
		if err := k.Clear(t.Context(), listKey, nil); err == nil {
			t.Error("there is a slice that the cache doesn't show, and nothing is to be deleted")
		}
		have := fakeapi.All[*discoveryv1.EndpointSlice](s, resource)
		if err := errors.Join(k.Ready(listKey, have), k.Clear(t.Context(), listKey, have)); err != nil {
			t.Error(err)
		}
		if left := fakeapi.All[*discoveryv1.EndpointSlice](s, resource); len(left) > 0 {
			t.Errorf("%d are left", len(left))
		}
		if err := k.Clear(t.Context(), listKey, nil); err != nil {
			t.Error(err)
		}
		k.Forget(listKey)
		if err := k.Ready(listKey, have); err != nil {
			t.Errorf("what was forgotten is remembered: %v", err)
		}
	})
}
