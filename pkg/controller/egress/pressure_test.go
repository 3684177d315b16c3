package egress

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
)

// A router whose table of connections is full drops those by which it is asked, too.
func TestSilentRouters(t *testing.T) {
	const much, little, unknown = "True AlmostFull", "False Enough", ""
	for _, tt := range []struct {
		name   string
		change func(*corev1.Pod)
		want   string
	}{
		{"ready", func(*corev1.Pod) {}, much},
		{"not ready", func(p *corev1.Pod) { p.Status.Conditions[0].Status = corev1.ConditionFalse }, unknown},
		{"another of its name", func(p *corev1.Pod) { p.UID = "2" }, unknown},
		{"started again", func(p *corev1.Pod) { p.Status.ContainerStatuses[1].ContainerID = "d" }, unknown},
		{"with a sidecar that was started again", func(p *corev1.Pod) { p.Status.ContainerStatuses[0].ContainerID = "t" }, much},
		{"gone", nil, unknown},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var answer plan.RouterPressure
			router := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				_ = json.NewEncoder(w).Encode(answer)
			}))
			defer router.Close()
			at := netip.MustParseAddrPort(router.Listener.Addr().String())
			f := newFixture(t)
			pod := routerPod(at.Addr().String(), corev1.ContainerPort{Name: "metrics", ContainerPort: int32(at.Port())})
			f.put(t, f.pods, pod)
			pressure := func() string {
				t.Helper()
				_ = f.syncPressure(t.Context(), nat) // it is done again later
				got, _, _ := strings.Cut(f.condition(t, v2.EgressConntrackPressure), ":")
				return got
			}
			answer = plan.RouterPressure{Connections: 1, MaxConnections: 1000}
			if got := pressure(); got != little {
				t.Errorf("ConntrackPressure is %q, want %q", got, little)
			}
			answer.Connections = 1000
			if got := pressure(); got != much {
				t.Errorf("ConntrackPressure of a full one is %q, want %q", got, much)
			}
			router.Close()
			if tt.change == nil {
				if err := f.pods.Delete(pod); err != nil {
					t.Fatal(err)
				}
			} else {
				pod = pod.DeepCopy()
				tt.change(pod)
				f.put(t, f.pods, pod)
			}
			for i := range 3 {
				if got := pressure(); got != tt.want {
					t.Errorf("try %d: ConntrackPressure of a silent one is %q, want %q", i, got, tt.want)
				}
			}
			// What was forgotten doesn't come back.
			if pod = routerPod(at.Addr().String(), pod.Spec.Containers[1].Ports[1]); tt.want == unknown {
				f.put(t, f.pods, pod)
				if got := pressure(); got != unknown {
					t.Errorf("ConntrackPressure is %q again", got)
				}
			}
		})
	}
}

func TestMetricsOf(t *testing.T) {
	for _, tt := range []struct {
		name string
		port corev1.ContainerPort
		want string
	}{
		{"by name", corev1.ContainerPort{Name: "metrics", ContainerPort: 9090}, "10.0.0.1:9090"},
		{"by number", corev1.ContainerPort{Name: "web", ContainerPort: 8080}, "10.0.0.1:8080"},
		{"by number and protocol", corev1.ContainerPort{ContainerPort: 8080, Protocol: corev1.ProtocolTCP}, "10.0.0.1:8080"},
		{"another protocol", corev1.ContainerPort{ContainerPort: 8080, Protocol: corev1.ProtocolUDP}, ""},
		{"another number", corev1.ContainerPort{Name: "web", ContainerPort: 9090}, ""},
	} {
		got := ""
		if at, ok := metricsOf(routerPod("10.0.0.1", tt.port)); ok {
			got = at.String()
		}
		if got != tt.want {
			t.Errorf("%s: metrics are at %q, want %q", tt.name, got, tt.want)
		}
	}
	// The name comes first, wherever it is.
	p := routerPod("10.0.0.1", corev1.ContainerPort{Name: "metrics", ContainerPort: 9090})
	p.Spec.Containers[1].Ports[0].ContainerPort = 8080
	if at, ok := metricsOf(p); !ok || at.Port() != 9090 {
		t.Errorf("metrics are at %s (%v), want port 9090", at, ok)
	}
}
