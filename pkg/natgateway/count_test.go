package natgateway

import (
	"errors"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// A client that has more connections than one may have opens no more until it has fewer, whatever the
// kernel's samples say.
func TestClientsOverLimit(t *testing.T) {
	run(t, func(f *fixture) {
		f.check(f.egresses.Update(&v2.Egress{
			ObjectMeta: metav1.ObjectMeta{Namespace: "internet", Name: "nat"},
			Spec:       v2.EgressSpec{Destinations: []string{"0.0.0.0/0"}, MaxConnectionsPerClient: new(int32(1000))},
		}))
		f.list(map[string]string{"a": "10.1.0.1", "b": "10.1.0.2"})
		a, b := netip.MustParseAddr("10.1.0.1"), netip.MustParseAddr("10.1.0.2")
		f.start()
		want := func(when string, flows map[netip.Addr]int, over ...netip.Addr) {
			t.Helper()
			f.kernel.mu.Lock()
			f.flows = flows
			f.kernel.mu.Unlock()
			time.Sleep(countEvery + 2*settle)
			synctest.Wait()
			f.kernel.mu.Lock()
			defer f.kernel.mu.Unlock()
			if !slices.Equal(f.filter.Over, over) {
				t.Errorf("%s: over the limit are %v, want %v", when, f.filter.Over, over)
			}
		}
		want("as many as may be", map[netip.Addr]int{a: 1000, b: 1000})
		want("more", map[netip.Addr]int{a: 5000, b: 1001}, a, b)
		f.kernel.mu.Lock()
		f.fail["size"] = errors.New("no memory")
		f.kernel.mu.Unlock()
		want("nothing can be read", nil, a, b)
		f.kernel.mu.Lock()
		delete(f.fail, "size")
		f.kernel.mu.Unlock()
		want("one has fewer", map[netip.Addr]int{a: 5000, b: 1000}, a)
		want("both have", map[netip.Addr]int{a: 1})
	})
}
