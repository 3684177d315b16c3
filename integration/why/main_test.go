// Package why breaks nodes, pods and objects of real API servers and kernels in many ways, and proves that what people are told is wrong is what was broken.
//
// coild is built so that it repairs nothing while a test asks for that: what is broken stays so.
package why

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/integration/rig/rigtest"
	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/testkit"
)

// shared is the rig of all tests. This machine's kernel may have no FoU.
var shared = rigtest.Shared{Parallel: 4, Options: rig.Options{Tags: []string{rig.StandInTunnels, "faultpoints"}}}

func TestMain(m *testing.M) { shared.Main(m) }

var pools atomic.Int32

// fixture is a node with a pod of a pool of its own, in a namespace of the pool's name.
type fixture struct {
	*rig.Rig
	*rig.Node
	t    *testing.T
	pool string
	pod  *rig.Sandbox
}

// newFixture makes one whose pool has blocks of four addresses.
func newFixture(t *testing.T) *fixture {
	t.Helper()
	r, number := shared.Rig(t), pools.Add(1)
	f := &fixture{Rig: r, t: t, pool: fmt.Sprintf("pool-%d", number)}
	ctx := t.Context()
	testkit.Check(t,
		r.AddPool(ctx, f.pool, 2, rig.Dual(fmt.Sprintf("10.%d.0.0/28", number), fmt.Sprintf("fd00:%x::/124", number))),
		r.AddNamespace(ctx, f.pool, f.pool),
	)
	f.Node = testkit.Must(r.AddNode(ctx, rig.NodeOptions{CoildFlags: []string{"--block-timeout=2s"}}))(t)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the end of the log of %s:\n%s", f.Name, f.Coild.Logs(40))
		}
		if err := f.Remove(context.WithoutCancel(ctx)); err != nil {
			t.Errorf("remove %s: %v", f.Name, err)
		}
	})
	f.pod = f.add()
	return f
}

// add adds a pod.
func (f *fixture) add() *rig.Sandbox {
	f.t.Helper()
	s := testkit.Must(f.NewSandbox(f.t.Context(), rig.SandboxOptions{Namespace: f.pool}))(f.t)
	testkit.Must(s.Add(f.t.Context()))(f.t)
	return s
}

// sh runs a script in the node's network namespace.
func (f *fixture) sh(script string) {
	f.t.Helper()
	rigtest.Sh(f.t, f.Node, script)
}

// ask asks coild about a pod.
func (f *fixture) ask(s *rig.Sandbox) *inspection.Answer {
	f.t.Helper()
	return testkit.Must(f.Debug(f.t.Context(), "pod", s.Namespace+"/"+s.Name))(f.t)
}
