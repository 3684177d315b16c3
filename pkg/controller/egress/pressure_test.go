package egress

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/gateway"
	"github.com/coil-net/coil/pkg/testkit"
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
			var answer gateway.Pressure
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
			answer = gateway.Pressure{Connections: 1, MaxConnections: 1000}
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
			// A forgotten answer doesn't come back.
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

// A pod that says that it is a router may answer with a header of megabytes, which costs many times its
// size.
func TestHeaderOfAnAnswerIsBounded(t *testing.T) {
	router := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		for i := range 1000 {
			w.Header().Set(fmt.Sprintf("X-%d", i), "x")
		}
		_ = json.NewEncoder(w).Encode(gateway.Pressure{Connections: 1, MaxConnections: 2})
	}))
	defer router.Close()
	answer, err := ask(t.Context(), netip.MustParseAddrPort(router.Listener.Addr().String()))
	if err == nil || !strings.Contains(err.Error(), "headers exceeded") {
		t.Errorf("answer %+v, error %v; want that its header is too long", answer, err)
	}
}

// An Egress whose routers answer as before, or that has none, isn't looked at after each question.
func TestSameAnswersAreNoNews(t *testing.T) {
	f := newFixture(t)
	for i, want := range []string{nat.String(), "", ""} {
		got := f.queued(t, func(ctx context.Context) { _ = f.syncPressure(ctx, nat) }) // it is done again later
		if strings.Join(got, " ") != want {
			t.Errorf("question %d: %q are looked at, want %q", i, got, want)
		}
	}
}

// silentPort is a port that accepts connections and never answers.
func silentPort(t *testing.T) int32 {
	l := testkit.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
	t.Cleanup(func() { l.Close() })
	return int32(l.Addr().(*net.TCPAddr).Port)
}

// scale makes an Egress want some routers.
func (f *fixture) scale(t *testing.T, replicas int32, s *appsv1.DeploymentStrategy) {
	t.Helper()
	e := f.egress(t).DeepCopy()
	e.Spec.Replicas, e.Spec.Strategy = replicas, s
	f.put(t, f.egresses, e)
}

// However many routers of an Egress never answer, other Egresses are asked soon, and so are its others.
func TestRoutersThatNeverAnswer(t *testing.T) {
	f := newFixture(t)
	f.askTimeout = 50 * time.Millisecond
	f.scale(t, 3*askedAtOnce, nil)
	silent := silentPort(t)
	for i := range 3*askedAtOnce - 1 {
		pod := routerPod("127.0.0.1", corev1.ContainerPort{Name: "metrics", ContainerPort: silent})
		pod.Name, pod.UID = fmt.Sprintf("silent-%02d", i), types.UID(fmt.Sprint(i))
		f.put(t, f.pods, pod)
	}
	start := time.Now()
	_ = f.syncPressure(t.Context(), nat) // it is done again later
	if took := time.Since(start); took > testkit.Timeout(4*time.Second) {
		t.Errorf("a round took %s", took)
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(gateway.Pressure{Connections: 1000, MaxConnections: 1000})
	}))
	defer server.Close()
	at := netip.MustParseAddrPort(server.Listener.Addr().String())
	pod := routerPod("127.0.0.1", corev1.ContainerPort{Name: "metrics", ContainerPort: int32(at.Port())})
	pod.Name = "talking" // the last one
	f.put(t, f.pods, pod)
	testkit.Eventually(t, 10*time.Second, "the router that answers is asked", func() error {
		_ = f.syncPressure(t.Context(), nat)
		if got := f.condition(t, v2.EgressConntrackPressure); !strings.HasPrefix(got, "True ") {
			return fmt.Errorf("ConntrackPressure is %q", got)
		}
		return nil
	})
}

// Any pod of a namespace may have the labels of routers: no more are asked than the Egress has.
func TestRoutersAreAskedAsFarAsTheEgressHasThem(t *testing.T) {
	rolling := func(surge intstr.IntOrString) *appsv1.DeploymentStrategy {
		return &appsv1.DeploymentStrategy{RollingUpdate: &appsv1.RollingUpdateDeployment{MaxSurge: &surge}}
	}
	for _, tt := range []struct {
		name     string
		replicas int32
		strategy *appsv1.DeploymentStrategy
		want     string
	}{
		{"and a quarter more, rounded up, as a rollout makes", 2, nil, "3 4 5"},
		{"and what a rollout makes", 1, rolling(intstr.FromInt32(3)), "3 4 5 6"},
		{"and what a rollout makes, as a share", 3, rolling(intstr.FromString("50%")), "3 4 5 6 7"},
		{"a share that isn't one", 3, rolling(intstr.FromString("half")), "3 4 5"},
		{"one after the other", 3, &appsv1.DeploymentStrategy{Type: appsv1.RecreateDeploymentStrategyType}, "3 4 5"},
		{"all there are", 20, nil, "2 3 4 5 6 7 8 9"},
		{"none", 0, nil, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture(t)
			f.scale(t, tt.replicas, tt.strategy)
			var mu sync.Mutex
			var asked []string
			router := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				mu.Lock()
				defer mu.Unlock()
				ip, _, _ := net.SplitHostPort(r.Host)
				asked = append(asked, strings.TrimPrefix(ip, "127.0.0."))
				_ = json.NewEncoder(w).Encode(gateway.Pressure{})
			}))
			if err := router.Listener.Close(); err != nil {
				t.Fatal(err)
			}
			router.Listener = testkit.Must(net.Listen("tcp4", ":0"))(t)
			router.Start()
			defer router.Close()
			for i := 1; i <= 9; i++ {
				pod := routerPod(fmt.Sprintf("127.0.0.%d", i), corev1.ContainerPort{Name: "metrics", ContainerPort: int32(router.Listener.Addr().(*net.TCPAddr).Port)})
				pod.Name, pod.UID = fmt.Sprint(i), types.UID(fmt.Sprint(i))
				switch i {
				case 1:
					pod.Status.Conditions[0].Status = corev1.ConditionFalse
				case 2:
					pod.DeletionTimestamp = new(metav1.Now())
				}
				f.put(t, f.pods, pod)
			}
			_ = f.syncPressure(t.Context(), nat) // it is done again later
			mu.Lock()
			defer mu.Unlock()
			slices.Sort(asked)
			if got := strings.Join(asked, " "); got != tt.want {
				t.Errorf("asked are %q, want %q", got, tt.want)
			}
		})
	}
}
