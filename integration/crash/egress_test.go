package crash

import (
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/testkit"
)

// egressCase is a pod whose Egress has no routers, so that all it is for is unreachable: that
// needs no FoU. Tunnels are with TestCoild in integration/egress.
type egressCase struct {
	*cluster
	node *rig.Node
	pod  *rig.Sandbox
}

// destinations makes the Egress, or changes it.
func (c *egressCase) destinations(all ...string) {
	c.t.Helper()
	ctx, egresses := c.t.Context(), c.Coil.CoilV2().Egresses(c.pools[0])
	e, err := egresses.Get(ctx, "gw", metav1.GetOptions{})
	if err != nil {
		_, err = egresses.Create(ctx, &v2.Egress{ObjectMeta: metav1.ObjectMeta{Name: "gw"}, Spec: v2.EgressSpec{Destinations: all}}, metav1.CreateOptions{})
	} else {
		e.Spec.Destinations = all
		_, err = egresses.Update(ctx, e, metav1.UpdateOptions{})
	}
	c.check(err)
}

// asks makes the pod ask for the Egress, or not.
func (c *egressCase) asks(yes bool) {
	c.t.Helper()
	value := any("gw")
	if !yes {
		value = nil
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]any{v2.AnnotationEgressPrefix + c.pools[0]: value}}})
	c.check(err)
	_, err = c.Core.CoreV1().Pods(c.pod.Namespace).Patch(c.t.Context(), c.pod.Name, types.MergePatchType, patch, metav1.PatchOptions{})
	c.check(err)
}

// ways says which packets don't go the ways, "destination way" each.
func (c *egressCase) ways(want ...string) error {
	var errs []error
	for _, w := range want {
		dst, way, _ := strings.Cut(w, " ")
		if got := c.pod.Way(c.t.Context(), dst); got != way {
			errs = append(errs, fmt.Errorf("%s goes by %s, want %s", dst, got, way))
		}
	}
	return errors.Join(errs...)
}

// recorded says whether the record has other Egresses of the pod than one with these
// destinations; none means that it has no record.
func (c *egressCase) recorded(destinations ...string) error {
	out, err := exec.CommandContext(c.t.Context(), "sqlite3", "-readonly", c.node.Database(), "SELECT egresses FROM clients").Output()
	if err != nil {
		return err
	}
	want := ""
	if len(destinations) > 0 {
		want = fmt.Sprintf(`[{"name":"%s/gw","destinations":["%s"]}]`, c.pools[0], strings.Join(destinations, `","`))
	}
	if got := strings.TrimSpace(string(out)); got != want {
		return fmt.Errorf("the record has %s, want %s", got, want)
	}
	return nil
}

// killedAt changes something while coild is away, and kills the next one when it passes a
// point on its way there.
func (c *egressCase) killedAt(p faultpoint.Point, change func()) {
	c.t.Helper()
	c.node.Coild.Kill()
	change()
	c.node.Coild.Faults = fmt.Sprintf("%s=1", p)
	c.check(c.node.Coild.Start())
	select {
	case <-c.node.Coild.Ended():
	case <-time.After(testkit.Timeout(20 * time.Second)):
		c.t.Fatalf("coild never passed %s", p)
	}
	c.node.Coild.Faults = ""
}

// restored starts coild and waits until record, kernel and API server agree.
func (c *egressCase) restored(agree func() error) {
	c.t.Helper()
	c.check(c.node.Start(c.t.Context()))
	testkit.Eventually(c.t, 20*time.Second, "record, kernel and API server agree", func() error {
		return errors.Join(agree(), c.pod.Check(c.t.Context())) // which waits for coild to look
	})
}

// coild is killed at each step by which a pod gets, changes and loses what Egresses need. No
// destination is open meanwhile that is closed before and after.
func TestKilledAtEgress(t *testing.T) {
	t.Parallel()
	base := newCluster(t, 3)
	c := &egressCase{cluster: base, node: base.node(rig.NodeOptions{})}
	c.pod = c.cluster.pod(c.node)
	few, other := []string{"192.0.2.0/24", "2001:db8::/32"}, []string{"192.0.2.0/25", "198.51.100.0/24", "2001:db8::/33"}
	closed := []string{"192.0.2.1 nowhere", "2001:db8::1 nowhere"}
	open := []string{"192.0.2.1 eth0", "2001:db8::1 eth0", "198.51.100.1 eth0"}
	removal := faultpoint.EgressRemoval
	for i, p := range faultpoint.EgressSetup {
		c.destinations(few...)
		c.killedAt(p, func() { c.asks(true) })
		switch p {
		case faultpoint.EgressRecorded, faultpoint.EgressClosed: // nothing was closed before
		default:
			c.check(c.ways(closed...))
		}
		c.check(c.recorded(few...))
		c.restored(func() error { return errors.Join(c.ways(append(closed, "198.51.100.1 eth0")...), c.recorded(few...)) })

		c.killedAt(p, func() { c.destinations(other...) })
		c.check(c.ways(closed...), c.recorded(other...))
		c.restored(func() error {
			return errors.Join(c.ways(append(closed, "198.51.100.1 nowhere", "192.0.2.200 eth0")...), c.recorded(other...))
		})

		c.killedAt(removal[i%len(removal)], func() { c.asks(false) })
		c.restored(func() error { return errors.Join(c.ways(open...), c.recorded()) })
	}
	c.works(c.node, c.pod)
	// A DEL that comes while coild is away leaves no record either.
	c.asks(true)
	testkit.Eventually(t, 20*time.Second, "closed", func() error { return errors.Join(c.ways(closed...), c.recorded(other...)) })
	c.node.Coild.Kill()
	c.check(end(t.Context(), c.pod), c.node.Start(t.Context()))
	testkit.Eventually(t, 20*time.Second, "the record is empty", func() error { return c.recorded() })
	c.blocksGoBack()
}
