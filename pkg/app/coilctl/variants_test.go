package coilctl_test

import (
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/inventory"
	"github.com/coil-net/coil/pkg/plan/page"
	"github.com/coil-net/coil/pkg/testkit"
)

// Kinds that the variants egress-only and ipam-only don't have.
var (
	ofIPAM   = []string{"addresspools", "addressblocks", "addressclaims", "loadbalancergateways"}
	ofEgress = []string{"egresses", "egresspolicies", "egressclusterpolicies"}
)

// leading has a Lease that was renewed then.
func leading(name string, at time.Time) *coordinationv1.Lease {
	renewed := metav1.NewMicroTime(at)
	return &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: coordinationv1.LeaseSpec{RenewTime: &renewed}}
}

// Variants have no definitions of what they leave out: its objects are none. That nothing of Coil is installed is an error.
func TestVariants(t *testing.T) {
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	all := slices.Concat(ofIPAM, ofEgress)
	for _, tt := range []struct {
		absent      []string
		command     string
		says, wrong string
	}{
		{ofIPAM, "status", "AddressPool           0       none\n", ""},
		{ofIPAM, "nodes", "n1     True", ""},
		{ofIPAM, "egresses", "nat", ""},
		{ofIPAM, "pools", "", "error: the API server has no addresspools of coil.cybozu.com: no variant of Coil that has them is installed"},
		{ofIPAM, "pools forecast", "", "error: the API server has no addresspools, addressblocks of coil.cybozu.com: "},
		{ofIPAM, "pools --watch", "", "error: the API server has no addresspools of coil.cybozu.com: "},
		{ofEgress, "status", "Egress                0       none\n", ""},
		{ofEgress, "pools", "default", ""},
		{ofEgress, "egresses", "", "error: the API server has no egresses, egresspolicies, egressclusterpolicies of coil.cybozu.com: "},
		{all, "status", "", "error: the API server has no addresspools, addressblocks, addressclaims"},
		{all, "nodes", "n1     True", ""},
	} {
		o := cluster()
		o.Leases = []*coordinationv1.Lease{leading(plan.IPAMLease, time.Now()), leading(plan.EgressLease, time.Now()), leading(plan.LBLease, time.Now())}
		a := serve(t, o)
		a.absent = tt.absent
		code, out, errOut := a.run("coilctl", strings.Fields(tt.command)...)
		if !strings.Contains(out, tt.says) || !strings.Contains(errOut, tt.wrong) || tt.wrong != "" && (code != 1 || out != "") {
			t.Errorf("%s without %q: exit code %d\n%s%s", tt.command, tt.absent, code, out, errOut)
		}
	}
}

// A script waits for an installation from before the definitions are there, and while the API server starts again.
func TestWaitForInstallation(t *testing.T) {
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	a := serve(t, inventory.Objects{})
	a.absent = slices.Concat(ofIPAM, ofEgress)
	type result struct {
		code        int
		out, errOut string
	}
	ended := make(chan result, 1)
	go func() {
		code, out, errOut := a.run("coilctl", "status", "--wait=1m")
		ended <- result{code, out, errOut}
	}()
	testkit.Eventually(t, 20*time.Second, "it asks", func() error {
		a.mu.Lock()
		defer a.mu.Unlock()
		if !slices.Contains(a.asked, "addresspools") {
			return fmt.Errorf("it asks for %q", a.asked)
		}
		a.absent = nil
		return nil
	})
	if r := <-ended; r.code != 0 || !strings.Contains(r.out, "AddressPool           0       none\n") || r.errOut != "" {
		t.Errorf("exit code %d\n%s%s", r.code, r.out, r.errOut)
	}
	a.absent = slices.Concat(ofIPAM, ofEgress)
	if code, _, errOut := a.run("coilctl", "status", "--wait=1ms"); code != 1 || !strings.Contains(errOut, "is installed") {
		t.Errorf("exit code %d, %s", code, errOut)
	}
}

// A watch of nodes shows them, too, in the variant egress-only.
func TestWatchVariant(t *testing.T) {
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	a := serve(t, cluster())
	a.absent = ofIPAM
	r, out := io.Pipe()
	w := a.watch(t, out, r, "nodes")
	w.wants("EVENT NAME READY COILD BLOCKS ADDRESSES FLOATING", "ADDED n1 True False 0 0/0 0")
	w.interrupt()
}

// So does the page. Where nothing of Coil is installed it says so.
func TestServeVariant(t *testing.T) {
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	a := serve(t, cluster())
	a.absent = ofIPAM
	s := a.servePage(t)
	l, leave := s.look()
	l.until("all is known", func() bool { return l.complete() && len(l.rows["nodes"]) == 1 && len(l.rows["egresses"]) == 1 })
	if problem := row[page.Source](l, "sources", "addresspools"); problem.Problem != "" || problem.Since != nil {
		t.Errorf("a kind that isn't installed is a problem: %+v", problem)
	}
	leave()
	s.interrupt()

	a.absent = slices.Concat(ofIPAM, ofEgress)
	s = a.servePage(t)
	l, _ = s.look()
	l.until("it is told", func() bool {
		source := row[page.Source](l, "sources", "addresspools")
		return !source.Known && strings.Contains(source.Problem, "is installed")
	})
	s.interrupt()
}

// What is late is judged by the clock of the cluster, whatever this computer's says.
func TestClock(t *testing.T) {
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	for _, tt := range []struct {
		name  string
		ahead time.Duration
		ago   time.Duration // by the cluster's clock
		late  bool
	}{
		{"the same", 0, time.Second, false},
		{"the same, and it is late", 0, 3 * time.Minute, true},
		{"this computer's is ahead", -5 * time.Minute, time.Second, false},
		{"this computer's is ahead, and it is late", -5 * time.Minute, 3 * time.Minute, true},
		{"this computer's is behind", 5 * time.Minute, time.Second, false},
		{"this computer's is behind, and it is late", 5 * time.Minute, 3 * time.Minute, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a := serve(t, inventory.Objects{
				Pools: []*v2.AddressPool{{ObjectMeta: meta("", "default")}}, Leases: []*coordinationv1.Lease{leading(plan.IPAMLease, time.Now().Add(tt.ahead-tt.ago))},
			})
			a.ahead = tt.ahead
			code, out, errOut := a.run("coilctl", "status")
			if late := strings.Contains(out, "Lease coil-ipam-leader: NoLeader for "); late != tt.late || (code == 1) != tt.late {
				t.Errorf("exit code %d\n%s%s", code, out, errOut)
			}
			s := a.servePage(t)
			l, _ := s.look()
			l.until("all is known", l.complete)
			l.until("the Lease is judged", func() bool { return (len(l.rows["findings"]) > 0) == tt.late })
			s.interrupt()
		})
	}
}
