package monitoring

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coil-net/coil/integration/lab/proc"
	"github.com/coil-net/coil/integration/monitoring/draw"
	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/integration/rig/rigtest"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// filled are the panels that must show something when a coil-ipam-controller and a coild run that have attached a pod.
var filled = map[string][]string{
	"addresses": {"Blocks in use", "Blocks", "Addresses of nodes' blocks", "BlockRequests"},
	"node": {
		"coild that don't answer", "Processor", "Memory", "Calls of the plugin", "Duration of calls", "Addresses", "Source guard", "Forged packets", "Duration of syncs",
		"Announced addresses",
	},
}

// A Prometheus reads coil-ipam-controller and coild, whose metrics have the types and labels that queries are checked against. It evaluates
// all panels and alerts without an error, and panels show something, also on the pages that are drawn as Grafana does it.
func TestPrometheus(t *testing.T) {
	controller := freeAddr(t)
	r := rigtest.NewWith(t, rig.Options{ControllerFlags: []string{"--metrics-addr=" + controller}})
	testkit.Check(t, r.AddPool(t.Context(), "default", 2, rig.V4("10.1.0.0/24")))
	n := testkit.Must(r.AddNode(t.Context(), rig.NodeOptions{}))(t)
	pod := testkit.Must(n.NewSandbox(t.Context(), rig.SandboxOptions{}))(t)
	testkit.Must(pod.Add(t.Context()))(t)

	// coild listens in a network namespace.
	coild := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		text, err := n.Get(req.Context(), "/metrics")
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		fmt.Fprint(w, text)
	}))
	t.Cleanup(coild.Close)
	known := exported(t)
	for _, from := range []string{coild.URL, "http://" + controller} {
		checkText(t, known, testkit.Must(netlab.Get(t.Context(), http.DefaultClient, from+"/metrics"))(t))
	}

	began := time.Now()
	restless(t, n)
	p := startPrometheus(t, []target{{strings.TrimPrefix(coild.URL, "http://"), "coild", n.Name}, {controller, "coil-ipam-controller", n.Name}})
	for name, d := range dashboards(t) {
		for _, panel := range d.Panels {
			for _, target := range panel.Targets {
				query := usual.All(target.Expr)
				if !slices.Contains(filled[name], panel.Title) {
					if _, err := p.Query(t.Context(), query); err != nil {
						t.Errorf("%s, %s: %v", name, panel.Title, err)
					}
					continue
				}
				testkit.Eventually(t, 30*time.Second, name+", "+panel.Title+" shows something", func() error {
					series, err := p.Query(t.Context(), query)
					if err == nil && len(series) == 0 {
						err = fmt.Errorf("%s has no result", query)
					}
					return err
				})
			}
		}
	}
	testkit.Eventually(t, 30*time.Second, "all alerts are evaluated", func() error { return p.evaluated(t.Context(), len(alerts(t))) })
	drawPages(t, p, draw.Window{From: began, To: time.Now(), Step: scrapeInterval, Rate: 10 * time.Second})
}

// restless has pods come to a node and go, until the test ends: durations of calls are those of the last moments.
func restless(t *testing.T, n *rig.Node) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	var ended sync.WaitGroup
	t.Cleanup(ended.Wait)
	t.Cleanup(stop)
	come := func() error {
		s, err := n.NewSandbox(ctx, rig.SandboxOptions{})
		if err != nil {
			return err
		}
		if _, err := s.Add(ctx); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
		case <-time.After(scrapeInterval):
		}
		return errors.Join(s.Del(ctx), s.Close())
	}
	ended.Go(func() {
		for ctx.Err() == nil {
			if err := come(); err != nil && ctx.Err() == nil {
				t.Error(err)
				return
			}
		}
	})
}

func freeAddr(t *testing.T) string {
	t.Helper()
	l := testkit.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer l.Close()
	return l.Addr().String()
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
type target struct{ addr, component, node string }

// scrapeInterval is how often Prometheus reads programs.
const scrapeInterval = 500 * time.Millisecond

// server is Debian's Prometheus, which runs as long as the test.
type server struct{ draw.Prometheus }

func startPrometheus(t *testing.T, targets []target) server {
	t.Helper()
	dir, addr := t.TempDir(), freeAddr(t)
	var config strings.Builder
	fmt.Fprintf(&config, "global: {scrape_interval: %[2]s, scrape_timeout: %[2]s, evaluation_interval: 1s}\nrule_files: [%[1]s]\nscrape_configs:\n- job_name: coil\n  static_configs:\n",
		testkit.Must(filepath.Abs(filepath.Join(folder, "rules.yaml")))(t), scrapeInterval)
	for _, to := range targets {
		fmt.Fprintf(&config, "  - {targets: [%q], labels: {component: %s, node: %s}}\n", to.addr, to.component, to.node)
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
