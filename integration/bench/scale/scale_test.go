package main

import (
	"context"
	"errors"
	"fmt"
	"net/http/httptest"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/coil-net/coil/integration/bench/figures"
	"github.com/coil-net/coil/integration/lab/controlplane"
	"github.com/coil-net/coil/pkg/testkit"
)

func TestMain(m *testing.M) {
	playRunner()
	playClientNode()
	rest.SetDefaultWarningHandler(rest.NoWarnings{})
	os.Exit(m.Run())
}

// need is for tests that measure on a small scale, in the time that tests have. What
// depends on the speed of the machine, which tests share, is left to the measurement.
func need(t *testing.T) options {
	t.Helper()
	testkit.Need(t, testkit.Netns)
	testkit.Need(t, testkit.APIServer)
	return options{
		nodes: 50, blocks: 400, singles: 5, burst: 300, coilds: 20,
		clients: 300, here: 3, policies: 20, addresses: 8, changes: 5, services: 50, endpoints: 3, following: 2 * time.Second, pairs: 5, window: 5 * time.Second, exhausted: 5 * time.Second,
		refusedCoilds: 20, restarted: 15, refused: 10 * time.Second,
		delay: time.Second, quiet: 2 * time.Second, log: os.Stderr,
	}
}

// figure returns the figure whose name contains a text.
func (r *report) figure(t *testing.T, text string) figures.Figure {
	t.Helper()
	i := slices.IndexFunc(r.Figures, func(f figures.Figure) bool { return strings.Contains(f.Name, text) })
	if i < 0 {
		t.Fatalf("there is no figure %q: %+v", text, r.Figures)
	}
	return r.Figures[i]
}

// The controller answers many requests about as fast as a client that only writes.
func TestController(t *testing.T) {
	rep := newReport()
	if err := measureController(t.Context(), need(t), rep); err != nil {
		t.Fatal(err)
	}
	if f := rep.figure(t, "controller by bare client"); f.Value < 0.4 {
		t.Errorf("the controller is %.2f times as fast as a bare client", f.Value)
	}
	if f := rep.figure(t, "most of the whole run"); !f.Reached {
		t.Errorf("even a small cluster takes the controller %.0f MiB", f.Value)
	}
}

// A pool whose block is late holds up no pod of another pool.
func TestLateBlock(t *testing.T) {
	o := need(t)
	if _, _, err := stall(t.Context(), o); err != nil {
		t.Fatal(err)
	}
}

// Each coild lists and watches what the table allows, once.
func TestCoilds(t *testing.T) {
	o := need(t)
	rep := newReport()
	if err := measureCoilds(t.Context(), o, rep); err != nil {
		t.Fatal(err)
	}
	for _, f := range rep.Figures {
		if !f.Reached {
			t.Errorf("%s: %v", f.Name, f.Value)
		}
	}
	if len(rep.Requests) == 0 {
		t.Error("no request was counted")
	}
	if t.Failed() {
		if err := rep.print(os.Stderr); err != nil {
			t.Log(err)
		}
	}
}

// The report ends with an error when a target was missed, and only then.
func TestReport(t *testing.T) {
	for _, tt := range []struct {
		name   string
		add    func(*report)
		missed bool
	}{
		{"reached", func(r *report) { r.Figures.AtMost("x", "s", 1, 1) }, false},
		{"too much", func(r *report) { r.Figures.AtMost("x", "s", 1.1, 1) }, true},
		{"too little", func(r *report) { r.Figures.AtLeast("x", "", 0.7, 0.8) }, true},
		{"without a target", func(r *report) { r.Figures.Note("x", "", 99) }, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newReport()
			tt.add(r)
			var out strings.Builder
			if err := r.print(&out); (err != nil) != tt.missed || strings.Contains(out.String(), "MISSED") != tt.missed {
				t.Errorf("error %v, printed\n%s", err, out.String())
			}
		})
	}
	if got := figures.Quantile([]time.Duration{3e6, 1e6, 2e6, 4e6}, 0.5); got != 2 {
		t.Errorf("the median of 1 to 4 ms is %v", got)
	}
}

// All that clients write is counted, and so is what nodes use for it.
func TestClients(t *testing.T) {
	rep := newReport()
	if err := measureClients(t.Context(), need(t), rep); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"EndpointSlices and the Egress into etcd, IPv4", "EndpointSlices and the Egress into etcd, IPv6"} {
		if f := rep.figure(t, name); f.Value == 0 || !f.Reached {
			t.Errorf("%s: %v MB/s, want some, and less than the target", name, f.Value)
		}
	}
	// At rest, who has few clients may sleep for as long as is measured.
	for _, name := range []string{"without these clients, at rest", "for 3 clients: what the changes add"} {
		if f := rep.figure(t, name); f.Value == 0 {
			t.Errorf("%s: nothing was measured", name)
		}
	}
	// A slice is written at most twice a second, and collects more than one change.
	if f := rep.figure(t, "writes of EndpointSlices, IPv4"); f.Value == 0 || f.Value >= changesPerSecond {
		t.Errorf("%v writes of slices per second: each change is written", f.Value)
	}
}

// Policies use all addresses, and the change of one writes its own lists alone.
func TestPolicies(t *testing.T) {
	rep := newReport()
	if err := measurePolicies(t.Context(), need(t), rep); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"addresses are used", "lists of their own", "lists of others"} {
		if f := rep.figure(t, name); !f.Reached {
			t.Errorf("%s: %v", f.Name, f.Value)
		}
	}
}

// Each node is refused once, which is counted, and then the pool is left alone.
func TestExhausted(t *testing.T) {
	rep := newReport()
	if err := measureExhausted(t.Context(), need(t), rep); err != nil {
		t.Fatal(err)
	}
	if f := rep.figure(t, "writes until then, of a node"); f.Value < 3 {
		t.Errorf("a refusal is %v writes, want the request, its answer and its end", f.Value)
	}
	if f := rep.figure(t, "writes in the worst minute"); !f.Reached {
		t.Errorf("%v writes/s after the refusals", f.Value)
	}
}

// All nodes notice that a router dies and that it lives again, and what they tell is counted.
func TestDeaths(t *testing.T) {
	rep := newReport()
	if err := measureDeaths(t.Context(), need(t), rep); err != nil {
		t.Fatal(err)
	}
	if f := rep.figure(t, "a router dies for 50 nodes: until all have noticed"); f.Value < 2 {
		t.Errorf("a router is dead after %v s, want three questions", f.Value)
	}
	for _, what := range []string{"dies", "lives again"} {
		if f := rep.figure(t, "a router "+what+" for 50 nodes: writes of Events"); f.Value == 0 || !f.Reached {
			t.Errorf("a router %s: %v Events for 50 nodes, want some, and a handful", what, f.Value)
		}
	}
}

// Coilds that are refused ask less and less often, and are in sync soon after that has ended.
func TestRefusals(t *testing.T) {
	rep := newReport()
	if err := measureRefusals(t.Context(), need(t), rep); err != nil {
		t.Fatal(err)
	}
	if f := rep.figure(t, "15 coilds start at once: watch namespaces"); f.Value < 15 || f.Value > 30 {
		t.Errorf("15 coilds watch Namespaces %v times", f.Value)
	}
	if f := rep.figure(t, "requests, seconds 0 to 1"); f.Value < 10 {
		t.Errorf("%v requests in the first second of 20 coilds", f.Value)
	}
	// In so short a time all may pause in the last quarter.
	if f := rep.figure(t, "in the last quarter by those in the first"); !f.Reached {
		t.Errorf("in the end there are %v times as many requests as at the begin", f.Value)
	}
	if f := rep.figure(t, "from then on until all are in sync"); !f.Reached {
		t.Errorf("all are in sync after %v s", f.Value)
	}
	if t.Failed() {
		if err := rep.print(os.Stderr); err != nil {
			t.Log(err)
		}
	}
}

// An operator sees a cluster without much memory and few lists; in the long form, a large one, and soon.
func TestStatus(t *testing.T) {
	o, rep := need(t), newReport()
	o.nodes, o.blocks = testkit.OperateForm.Times(o.nodes, 5000), testkit.OperateForm.Times(o.blocks, 20000)
	if err := measureStatus(t.Context(), o, rep); err != nil {
		t.Fatal(err)
	}
	for _, f := range rep.Figures {
		t.Logf("%s: %v %s", f.Name, f.Value, f.Unit)
		if !f.Reached && (f.Unit != "s" || testkit.OperateForm.Long()) {
			t.Errorf("%s: %v %s, want at most %v", f.Name, f.Value, f.Unit, *f.AtMost)
		}
	}
}

// The verb and the resource of a request are those that Kubernetes writes into its audit log.
func TestVerbAndResource(t *testing.T) {
	for request, want := range map[string]string{
		"GET /api/v1/namespaces":                                                "list namespaces",
		"GET /api/v1/namespaces/default":                                        "get namespaces",
		"GET /api/v1/nodes?watch=true&fieldSelector=metadata.name%3Da":          "watch nodes",
		"POST /api/v1/namespaces/default/events":                                "create events",
		"GET /apis/coil.cybozu.com/v2/namespaces/internet/egresses/nat":         "get egresses",
		"PATCH /apis/coil.cybozu.com/v2/addressblocks/default-0/status":         "patch addressblocks/status",
		"DELETE /apis/coil.cybozu.com/v2/blockrequests/a":                       "delete blockrequests",
		"GET /apis/discovery.k8s.io/v1/endpointslices?sendInitialEvents=true":   "list endpointslices",
		"PUT /apis/coordination.k8s.io/v1/namespaces/kube-system/leases/leader": "update leases",
		"GET /readyz": "list readyz",
	} {
		method, uri, _ := strings.Cut(request, " ")
		if got := verbAndResource(httptest.NewRequest(method, uri, nil)); got != want {
			t.Errorf("%s is %q, want %q", request, got, want)
		}
	}
}

// etcd's own watch counts each write of a kind, with the bytes that are stored, and each end.
func TestLedger(t *testing.T) {
	testkit.Need(t, testkit.APIServer)
	api := testkit.Must(controlplane.StartAPI(t.Context(), controlplane.Options{Log: os.Stderr}))(t)
	t.Cleanup(func() { testkit.Check(t, api.Stop()) })
	core := testkit.Must(kubernetes.NewForConfig(api.RESTConfig()))(t)
	l := testkit.Must(watchEtcd(t.Context(), api, "configmaps/default/", func(key string) string {
		if strings.HasSuffix(key, "/counted") {
			return "counted"
		}
		return ""
	}))(t)
	t.Cleanup(l.close)
	maps := core.CoreV1().ConfigMaps("default")
	for _, name := range []string{"counted", "ignored"} {
		testkit.Must(maps.Create(t.Context(), &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string]string{"text": strings.Repeat("x", 10000)},
		}, metav1.CreateOptions{}))(t)
		testkit.Check(t, maps.Delete(t.Context(), name, metav1.DeleteOptions{}))
	}
	testkit.Eventually(t, 10*time.Second, "both writes are counted", func() error {
		counts, err := l.counts()
		if err != nil {
			return err
		}
		w := counts["counted"]
		if len(counts) != 1 || w.Count != 2 || w.Bytes < 10000 || w.Bytes > 11000 {
			return fmt.Errorf("counted %+v, want 2 writes and a little more than 10,000 bytes", counts)
		}
		return nil
	})
}

// Keys are of the kinds that figures are about.
func TestKinds(t *testing.T) {
	for _, tt := range []struct {
		key           string
		egress, block string
	}{
		{"/registry/endpointslices/gateways/nat-clients-ipv4-7", kindIPv4, ""},
		{"/registry/endpointslices/gateways/nat-clients-ipv6-0", kindIPv6, ""},
		{"/registry/endpointslices/gateways/nat-x7k2p", kindOther, ""},
		{"/registry/coil.cybozu.com/egresses/gateways/nat", kindEgress, ""},
		{"/registry/pods/customers/a", kindOther, ""},
		{"/registry/coil.cybozu.com/blockrequests/a", kindOther, kindRequest},
		{"/registry/coil.cybozu.com/addresspools/a", kindOther, kindPool},
		{"/registry/coil.cybozu.com/addressblocks/a", kindOther, kindBlock},
		{"/registry/events/default/a", kindOther, kindEvent},
		{"/registry/leases/kube-system/a", kindOther, ""},
	} {
		if e, b := kindOfKey(tt.key), kindOfCoil(tt.key); e != tt.egress || b != tt.block {
			t.Errorf("%s is %q and %q, want %q and %q", tt.key, e, b, tt.egress, tt.block)
		}
	}
}

// The memory of a program that ends soon is its own, and not that of the process that has started it; its exit code is told.
func TestRunMeasured(t *testing.T) {
	large := make([]byte, 1<<28)
	for i := 0; i < len(large); i += 4096 {
		large[i] = 1
	}
	out, u, err := runMeasured(t.Context(), "sh", "-c", "echo out; exit 3")
	if failed := (*exec.ExitError)(nil); !errors.As(err, &failed) || failed.ExitCode() != 3 || string(out) != "out\n" {
		t.Errorf("%s, error %v", out, err)
	}
	if u.MaxRSS <= 0 || u.MaxRSS > 1<<17 || u.Took <= 0 {
		t.Errorf("a shell uses %+v", u)
	}
	runtime.KeepAlive(large)
}

// A process's clock counts what it uses, and not what passes.
func TestUsage(t *testing.T) {
	spin := func(ctx context.Context) error {
		before, err := cpuTime(os.Getpid())
		for now := before; err == nil && now-before < 50*time.Millisecond && ctx.Err() == nil; {
			now, err = cpuTime(os.Getpid())
		}
		return err
	}
	busy := testkit.Must(usage(t.Context(), []int{os.Getpid()}, spin))(t)
	idle := testkit.Must(usage(t.Context(), []int{os.Getpid()}, pass(300*time.Millisecond)))(t)
	if busy[0] <= 2*idle[0] {
		t.Errorf("at work %v of a processor, at rest %v", busy[0], idle[0])
	}
	if _, err := usage(t.Context(), []int{1 << 22}, pass(0)); err == nil {
		t.Error("no error about PID_MAX_LIMIT, which no process has")
	}
}

// Services get addresses, and one more does soon.
func TestScenario34Services(t *testing.T) {
	rep := newReport()
	if err := measureServices(t.Context(), need(t), rep); err != nil {
		t.Fatal(err)
	}
	if f := rep.figure(t, "controller by bare client"); f.Value <= 0 {
		t.Errorf("the controller is %.2f times as fast as a bare client", f.Value)
	}
	if f := rep.figure(t, "one more beside 50, until it tells its address, median"); f.Value <= 0 || f.Value > float64(testkit.Timeout(5*time.Second).Milliseconds()) {
		t.Errorf("one more Service has its address after %.0f ms", f.Value)
	}
}

// A gateway machine has all Services soon, and follows their endpoints.
func TestScenario34Gateway(t *testing.T) {
	rep := newReport()
	o := need(t)
	o.services = 120 // more than the few
	if err := measureGateway(t.Context(), o, rep); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"120 Services of 3 endpoints, from the agent's start", "resident memory of coil-lb-agent after the changes", "of that to plan the table"} {
		if f := rep.figure(t, name); f.Value <= 0 || !f.Reached {
			t.Errorf("%s: %v", f.Name, f.Value)
		}
	}
	for _, name := range []string{"endpoints of 100 Services, from the EndpointSlice's write being sent until the kernel has it, median", "beside 120 Services by beside 100"} {
		if f := rep.figure(t, name); f.Value <= 0 {
			t.Errorf("%s: nothing was measured", name)
		}
	}
}

// Packets cost something by all ways, more where they are translated.
func TestTranslation(t *testing.T) {
	rep := newReport()
	if err := measureTranslation(t.Context(), need(t), rep); err != nil {
		t.Fatal(err)
	}
	for _, n := range []string{"10", "50"} {
		first := "translation: " + n + " Services of 3 endpoints, the first packet of a connection, "
		bare := rep.figure(t, first+"untranslated").Value
		for _, by := range []string{"coil-lb-agent", "kube-proxy"} {
			if f := rep.figure(t, first+by); f.Value <= bare {
				t.Errorf("%s takes %v us, and untranslated %v us", f.Name, f.Value, bare)
			}
		}
		if f := rep.figure(t, n+" Services of 3 endpoints, a packet of a connection and its answer, coil-lb-agent by kube-proxy"); f.Value <= 0 {
			t.Errorf("%s is %v", f.Name, f.Value)
		}
	}
}
