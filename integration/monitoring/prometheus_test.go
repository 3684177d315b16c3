package monitoring

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/integration/lab/proc"
	"github.com/coil-net/coil/integration/monitoring/draw"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// empty are the panels that may show nothing of the world: they are about what goes wrong, about days, and about gateways and OpenStack, which it doesn't have.
var empty = map[string][]string{
	"addresses": {
		"Blocks in three days", "Time until the last block", "Nodes without a free address", "AddressClaims that wait", "Lost blocks", "Syncs of coil-ipam-controller that failed",
	},
	"egress": {"Ports", "Connections by floating address", "Time until a client is served", "Routers that don't answer", "Time until another router"},
	"node":   {"Calls that failed", "Repairs", "Syncs that failed", "Addresses of no link"},
	"services": {
		"Syncs of coil-lb-controller that failed", "Moves", "Duration of handovers", "Gateways that aren't well", "Masters", "Dropped packets", "Services of gateways", "Calls",
		"Duration of calls",
	},
}

// A Prometheus reads all programs of a cluster, whose metrics have the types and labels that queries are checked against. It evaluates all panels and alerts without an
// error, and panels show something on pages that are drawn as Grafana does it.
func TestPrometheus(t *testing.T) {
	w := newWorld(t)
	w.wayOut()
	w.wayIn()
	known := exported(t)
	for _, from := range w.targets {
		checkText(t, known, testkit.Must(netlab.Get(t.Context(), http.DefaultClient, "http://"+from.addr+"/metrics"))(t))
	}
	began := time.Now()
	p := startPrometheus(t, w.targets)
	w.client(w.nodes[0])
	w.pods(w.nodes[1])
	for name, d := range dashboards(t) {
		for _, panel := range d.Panels {
			for _, target := range panel.Targets {
				if _, err := p.Query(t.Context(), usual.All(target.Expr)); err != nil {
					t.Errorf("%s, %s: %v", name, panel.Title, err)
				}
			}
		}
	}
	testkit.Eventually(t, 30*time.Second, "all alerts are evaluated", func() error { return p.evaluated(t.Context(), len(alerts(t))) })
	if *update { // pictures have more to show
		<-time.After(3*time.Minute - time.Since(began))
	}
	drawPages(t, p, began)
}

// checkText compares what a program exports with what is known of it.
func checkText(t *testing.T, known map[string]metric, text string) {
	t.Helper()
	seen := 0
	for _, m := range regexp.MustCompile(`(?m)^# TYPE (coil_\w+) (\w+)$`).FindAllStringSubmatch(text, -1) {
		seen++
		if have, ok := known[m[1]]; !ok || string(have.kind) != m[2] {
			t.Errorf("%s is a %s; known is %v", m[1], m[2], have)
		}
	}
	if seen == 0 {
		t.Errorf("there are no metrics: %.200s", text)
	}
	for _, m := range regexp.MustCompile(`(?m)^(coil_\w+)\{(.*)\} `).FindAllStringSubmatch(text, -1) {
		name, labels := m[1], []string{}
		have, ok := known[name]
		if !ok { // of a histogram
			have = known[regexp.MustCompile(`_(bucket|sum|count)$`).ReplaceAllLiteralString(name, "")]
		}
		for _, l := range regexp.MustCompile(`(\w+)="`).FindAllStringSubmatch(m[2], -1) {
			if l[1] != "le" {
				labels = append(labels, l[1])
			}
		}
		if !slices.Equal(sorted(labels), have.labels) {
			t.Errorf("%s has the labels %v; known are %v", name, labels, have.labels)
		}
	}
}

// target is a program that Prometheus reads.
type target struct{ addr, component, node, job string }

// scrapeInterval is how often Prometheus reads programs.
const scrapeInterval = 500 * time.Millisecond

// server is Debian's Prometheus, which runs as long as the test.
type server struct{ draw.Prometheus }

func startPrometheus(t *testing.T, targets []target) server {
	t.Helper()
	dir, addr := t.TempDir(), testkit.FreeAddr(t)
	var config strings.Builder
	fmt.Fprintf(&config, "global: {scrape_interval: %[2]s, scrape_timeout: %[2]s, evaluation_interval: 1s}\nrule_files: [%[1]s]\nscrape_configs:\n",
		testkit.Must(filepath.Abs(filepath.Join(folder, "rules.yaml")))(t), scrapeInterval)
	for _, job := range jobs(t) {
		// Routers of Egresses say themselves which pod they are.
		fmt.Fprintf(&config, "- job_name: %s\n  honor_labels: %t\n  static_configs:\n", job, job == "coil-egress")
		for _, to := range targets {
			if to.job == job {
				fmt.Fprintf(&config, "  - {targets: [%q], labels: {component: %s, node: %s}}\n", to.addr, to.component, to.node)
			}
		}
	}
	file, log := filepath.Join(dir, "prometheus.yaml"), filepath.Join(dir, "log")
	testkit.Check(t, os.WriteFile(file, []byte(config.String()), 0o644))
	p := testkit.Must(proc.Start(proc.Command{
		Path: "prometheus", Args: []string{"--config.file=" + file, "--storage.tsdb.path=" + filepath.Join(dir, "data"), "--web.listen-address=" + addr}, Log: log,
	}))(t)
	t.Cleanup(func() {
		p.Kill()
		if t.Failed() {
			t.Logf("Prometheus says:\n%s", proc.Tail(log, 20))
		}
	})
	s := server{draw.Prometheus{URL: "http://" + addr}}
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout(30*time.Second))
	defer cancel()
	testkit.Check(t, p.WaitFor(ctx, func(ctx context.Context) error {
		_, err := netlab.Get(ctx, http.DefaultClient, s.URL+"/-/ready")
		return err
	}))
	return s
}

// evaluated is nil when all rules were evaluated, and none has failed.
func (s server) evaluated(ctx context.Context, want int) error {
	var data struct {
		Groups []struct {
			Rules []struct{ Name, Health, LastError string }
		}
	}
	if err := s.Get(ctx, "/api/v1/rules", &data); err != nil {
		return err
	}
	n := 0
	for _, g := range data.Groups {
		for _, r := range g.Rules {
			if r.Health != "ok" {
				return fmt.Errorf("%s: %s %s", r.Name, r.Health, r.LastError)
			}
			n++
		}
	}
	if n != want {
		return fmt.Errorf("there are %d rules, want %d", n, want)
	}
	return nil
}
