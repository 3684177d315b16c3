package diagnosis

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/inspection"
)

// askRouters lets the pod use an Egress with two routers, which have all for it.
func (f *PodFacts) askRouters() {
	f.use()
	f.Answer.Node.Conntrack = &inspection.Conntrack{Count: 100, Limit: 65536}
	for _, name := range []string{"nat-a", "nat-b"} {
		f.Routers = append(f.Routers, AskedRouter{
			Egress: types.NamespacedName{Namespace: "internet", Name: "nat"}, Pod: &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "internet", Name: name}},
			Answer: &inspection.RouterAnswer{
				Router: inspection.Router{Pod: name, Conntrack: inspection.Conntrack{Count: 5, Limit: 100}, MaxPerClient: 10},
				Clients: []inspection.RouterClient{{
					Address: addr, Objects: []inspection.Comparison{comparison(inspection.RouterTunnel, "tunnel to "+addr), comparison(inspection.RouterRoute, "route to "+addr)},
				}},
				Shared: []inspection.Comparison{comparison(inspection.RouterRules, "rule 2100"), comparison(inspection.RouterFilter, "table inet coil")},
			},
		})
	}
}

// What routers have for a pod, and how full tables of connections are, are steps of its walk.
func TestPeers(t *testing.T) {
	for _, c := range []struct {
		name  string
		spoil func(f *PodFacts)
		wrong string
		says  []string // of the first wrong step or, without one, of the steps peers and conntrack
	}{
		{"healthy", func(*PodFacts) {}, "", []string{"2 routers have the tunnel", "node n1: 100 of 65536 connections are tracked", "router internet/nat-b: 5 of 100"}},
		{"nobody answers", func(f *PodFacts) {
			for i := range f.Routers {
				f.Routers[i].Answer, f.Routers[i].Unanswered = nil, "forbidden"
			}
		}, "", []string{"router internet/nat-a: forbidden", "pods/exec in the namespace of the Egress"}},
		{"pods can't be listed", func(f *PodFacts) { f.Routers, f.Unread = nil, map[string]string{KindRouters: "forbidden"} }, "", []string{"pods of routers couldn't be read"}},
		{"router doesn't know the pod", func(f *PodFacts) { f.Routers[1].Answer.Clients = nil }, "peers", []string{"router internet/nat-b: it doesn't know the pod", "coil-egress-controller leads"}},
		{"router without the tunnel", func(f *PodFacts) {
			o := &f.Routers[0].Answer.Clients[0].Objects[0]
			o.OK, o.Have = false, ""
		}, "peers", []string{"router internet/nat-a: tunnel to 10.0.0.1 is missing", "logs nat-a"}},
		{"router without rules", func(f *PodFacts) { f.Routers[0].Answer.Shared[0].OK = false }, "peers", []string{"rule 2100"}},
		{"router that isn't ready", func(f *PodFacts) { f.Routers[0].Answer.Router.NotReady = "network: rp_filter" }, "peers", []string{"rp_filter"}},
		{"too many connections of the pod", func(f *PodFacts) { f.Routers[0].Answer.Router.Over = []string{addr} }, "peers", []string{"more than the 10 connections", "maxConnectionsPerClient"}},
		{"pod isn't set up", func(f *PodFacts) { f.at().Client, f.Routers[0].Answer.Clients = nil, nil }, "tunnels", []string{"hasn't set the pod up"}},
		{"router's table is full", func(f *PodFacts) { f.Routers[1].Answer.Router.Conntrack.Count = 90 }, "conntrack", []string{"router internet/nat-b: 90 of 100", "nf_conntrack_max"}},
		{"node's table is full", func(f *PodFacts) { f.Answer.Node.Conntrack.Count = 65000 }, "conntrack", []string{"node n1: 65000 of 65536"}},
		{"nothing is tracked", func(f *PodFacts) { f.Answer.Node.Conntrack.Limit = 0 }, "", []string{"node n1: no connections are tracked"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := world()
			f.askRouters()
			c.spoil(f)
			d := Pod(*f)
			if got := strings.Join(d.Wrong(), " "); got != c.wrong {
				t.Fatalf("wrong are %q, want %q:\n%+v", got, c.wrong, d.Steps)
			}
			said := ""
			for _, s := range d.Steps {
				if s.State == Wrong || c.wrong == "" && (s.Step == StepPeers || s.Step == StepConntrack) {
					said += s.Seen + " // " + s.Do + "\n"
				}
			}
			for _, text := range c.says {
				if !strings.Contains(said, text) {
					t.Errorf("%q isn't said: %s", text, said)
				}
			}
		})
	}
}

// The routers of all Egresses that a pod uses are asked, those of a router of none.
func TestEgressesOf(t *testing.T) {
	f := world()
	if got := EgressesOf(*f); len(got) > 0 {
		t.Errorf("without an Egress: %v", got)
	}
	f.use()
	if got := EgressesOf(*f); len(got) != 1 || got[0].String() != "internet/nat" {
		t.Errorf("by the annotation: %v", got)
	}
	f.Pod.Labels = plan.RouterLabels("nat")
	if got := EgressesOf(*f); len(got) > 0 {
		t.Errorf("of a router: %v", got)
	}
}
