package apiserver

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/egress"
	"github.com/coil-net/coil/pkg/plan/gateway"
	"github.com/coil-net/coil/pkg/testkit"
)

// Answers of routers, as coil-egress gives them, become conditions of their Egress. A router that
// doesn't answer, or answers with something else, costs the others nothing.
func TestEgressPressure(t *testing.T) {
	c := newEgressCluster(t)
	c.start(t)
	c.egress(t, "nat", `{destinations: [0.0.0.0/0], replicas: 2}`)
	var connections atomic.Int64
	answering := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != gateway.PressurePath {
			http.NotFound(w, r)
			return
		}
		_ = json.NewEncoder(w).Encode(gateway.Pressure{Connections: int(connections.Load()), MaxConnections: 1000, MaxPorts: gateway.SourcePorts})
	}))
	defer answering.Close()
	wrong := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "<html>") }))
	defer wrong.Close()
	c.router(t, "wrong", wrong.Listener.Addr())
	p := c.router(t, "answering", answering.Listener.Addr())
	c.condition(t, "nat", v2.EgressConntrackPressure, metav1.ConditionFalse, egress.ReasonEnough)
	c.condition(t, "nat", v2.EgressPortPressure, metav1.ConditionFalse, egress.ReasonEnough)

	connections.Store(800)
	// A change of the pod is a reason to ask again, sooner than otherwise.
	p.Status.Message = "changed"
	p = testkit.Must(c.core.CoreV1().Pods(c.ns).UpdateStatus(t.Context(), p, metav1.UpdateOptions{}))(t)
	got := c.condition(t, "nat", v2.EgressConntrackPressure, metav1.ConditionTrue, egress.ReasonAlmostFull)
	if !strings.Contains(got.Message, "Pod answering tracks more than 80 %") {
		t.Errorf("it says %q", got.Message)
	}
	testkit.Eventually(t, 10*time.Second, "an Event", func() error {
		if got := c.reasons(t, c.ns, "nat"); got["ConntrackPressure"] == 0 || got["PortPressure"] != 0 {
			return fmt.Errorf("%v", got)
		}
		return nil
	})
	// Of a router that isn't ready, nothing is known.
	p.Status.Conditions = nil
	testkit.Must(c.core.CoreV1().Pods(c.ns).UpdateStatus(t.Context(), p, metav1.UpdateOptions{}))(t)
	testkit.Eventually(t, 10*time.Second, "no condition", func() error {
		e, err := c.coil.CoilV2().Egresses(c.ns).Get(t.Context(), "nat", metav1.GetOptions{})
		if err == nil && meta.FindStatusCondition(e.Status.Conditions, v2.EgressConntrackPressure) != nil {
			err = errors.New("it is still there")
		}
		return err
	})
}

// router makes a pod of the Egress nat that is ready, and whose metrics are at an address.
func (c *egressCluster) router(t testing.TB, name string, at net.Addr) *corev1.Pod {
	t.Helper()
	host, port, err := net.SplitHostPort(at.String())
	testkit.Check(t, err)
	var number int32
	testkit.Must(fmt.Sscan(port, &number))(t)
	p := testkit.Must(c.core.CoreV1().Pods(c.ns).Create(t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: plan.RouterLabels("nat")},
		Spec: corev1.PodSpec{NodeName: "node", Containers: []corev1.Container{
			{Name: "sidecar", Image: "i"},
			{Name: "egress", Image: "i", Ports: []corev1.ContainerPort{{Name: "metrics", ContainerPort: number}}},
		}},
	}, metav1.CreateOptions{}))(t)
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	return testkit.Must(c.setStatus(t.Context(), p, corev1.PodRunning, host))(t)
}
