package loadbalancer

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// The claim of a Service is found by the address that it remembers, else by the block that names it, else by the name that the controller gives.
func TestClaimOf(t *testing.T) {
	claim := func(name, uid, addr string) *v2.AddressClaim {
		c := &v2.AddressClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: name, UID: types.UID(uid)}}
		if addr != "" {
			c.Status.Addresses = []v2.ClaimedAddress{{IPv4: addr}}
		}
		return c
	}
	going := claim("lb-u1", "going", "192.0.2.1")
	going.DeletionTimestamp = &metav1.Time{}
	claims := []*v2.AddressClaim{going, claim("lb-u2", "c2", "192.0.2.2"), claim("lb-u1", "c1", "192.0.2.1"), claim("lb-u3", "c3", ""), claim("lb-192-0-2-9", "c9", "")}
	b := &v2.AddressBlock{Floating: &v2.Floating{Owner: v2.FloatingOwner{UID: "c2"}, Ports: []v2.FloatingPort{{Port: 80, Service: "shop/web"}}}}
	for _, c := range []struct {
		name, uid, assigned, wanted string
		blocks                      []*v2.AddressBlock
		want                        types.UID
	}{
		{"by its address", "u9", "192.0.2.1", "", []*v2.AddressBlock{b}, "c1"},
		{"by its block", "u9", "", "", []*v2.AddressBlock{{}, b}, "c2"},
		{"by its address, which nobody has any more, and its block", "u9", "192.0.2.77", "", []*v2.AddressBlock{b}, "c2"},
		{"by its UID", "u3", "", "", nil, "c3"},
		{"by the address that it asks for", "u3", "", "192.0.2.9", nil, "c9"},
		{"none", "u9", "", "", nil, ""},
	} {
		s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", UID: types.UID(c.uid), Annotations: map[string]string{AnnotationAssigned: c.assigned, AnnotationWanted: c.wanted}}}
		var got types.UID
		if found := ClaimOf(s, claims, c.blocks); found != nil {
			got = found.UID
		}
		if got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}
