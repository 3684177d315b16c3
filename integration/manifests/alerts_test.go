package manifests

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"text/template"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/informers"
	kubefake "k8s.io/client-go/kubernetes/fake"
	metadatafake "k8s.io/client-go/metadata/fake"
	"sigs.k8s.io/yaml"

	coilfake "github.com/coil-net/coil/generated/clientset/versioned/fake"
	"github.com/coil-net/coil/generated/informers/externalversions"
	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/pkg/controller/blockrequest"
	"github.com/coil-net/coil/pkg/controller/egress"
	claims "github.com/coil-net/coil/pkg/controller/floating"
	"github.com/coil-net/coil/pkg/controller/loadbalancer"
	"github.com/coil-net/coil/pkg/controller/pool"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/natgateway"
	"github.com/coil-net/coil/pkg/node/floating"
	"github.com/coil-net/coil/pkg/node/floating/standby"
	"github.com/coil-net/coil/pkg/plan/gateway"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/testkit"
)

// rules are those of Prometheus, as far as Coil uses them.
type rules struct {
	Groups []struct {
		Name  string
		Rules []alert
	}
}

type alert struct {
	Alert, Expr, For    string
	Labels, Annotations map[string]string
}

func monitoring(t *testing.T, file string) []byte {
	t.Helper()
	root := testkit.Must(build.Root())(t)
	return testkit.Must(os.ReadFile(filepath.Join(root, "manifests", "monitoring", file)))(t)
}

// registered returns the metrics that programs register and alerts are about, each with its
// labels.
func registered(t *testing.T) map[string][]string {
	t.Helper()
	core, coil := kubefake.NewClientset(), coilfake.NewSimpleClientset()
	all, own := informers.NewSharedInformerFactory(core, 0), externalversions.NewSharedInformerFactory(coil, 0).Coil().V2()
	namespaces := kube.MetadataInformer(metadatafake.NewSimpleMetadataClient(metadatafake.NewTestScheme()), corev1.SchemeGroupVersion.WithResource("namespaces"), "")
	r := prometheus.NewRegistry()
	loops := reconcile.NewMetrics(r)
	reconcile.NewRepairs(r, nil)
	carver := testkit.Must(blockrequest.New(blockrequest.Config{
		Coil: coil, Core: core, Requests: own.BlockRequests(), Blocks: own.AddressBlocks(), Pools: own.AddressPools(), Nodes: all.Core().V1().Nodes(),
	}))(t)
	testkit.Must(pool.New(pool.Config{
		Coil: coil, Pools: own.AddressPools(), Blocks: own.AddressBlocks(), Nodes: all.Core().V1().Nodes(),
		Services: all.Networking().V1().ServiceCIDRs(), Carver: carver, LoopMetrics: loops, Registry: r,
	}))(t)
	testkit.Must(egress.New(egress.Config{
		Coil: coil, Core: core, Egresses: own.Egresses(), Cluster: all, Namespaces: namespaces, Routers: all, Accounts: all, Clients: all,
		LoopMetrics: loops, Registry: r,
	}))(t)
	testkit.Must(claims.New(claims.Config{
		Coil: coil, Core: core, Claims: own.AddressClaims(), Blocks: own.AddressBlocks(), Pools: own.AddressPools(), LoopMetrics: loops, Registry: r,
	}))(t)
	testkit.Must(loadbalancer.New(loadbalancer.Config{
		Coil: coil, Core: core, Pools: own.AddressPools(), Claims: own.AddressClaims(), Gateways: own.LoadBalancerGateways(), Blocks: own.AddressBlocks().Informer(), Cluster: all, LoopMetrics: loops, Registry: r,
	}))(t)
	r.MustRegister(natgateway.NewCollector(t.Context(), natgateway.Config{Namespace: "n", Egress: "e", Config: gateway.Config{Pod: "p"}}, nil, nil, nil))
	r.MustRegister(floating.NewTroubles(floating.TroublesConfig{}, nil))
	floating.New(floating.Config{}, r)
	standby.New(t.Context(), standby.Config{}, r)

	described := make(chan *prometheus.Desc)
	go func() {
		defer close(described)
		r.Describe(described)
	}()
	// Desc{fqName: "name", help: "...", constLabels: {a="b"}, variableLabels: {c,d}}
	form := regexp.MustCompile(`fqName: "(\w+)".* constLabels: \{(.*)\}, variableLabels: \{(.*)\}`)
	found := map[string][]string{"up": nil} // Prometheus's own
	for d := range described {
		parts := form.FindStringSubmatch(d.String())
		if parts == nil {
			t.Fatalf("%s can't be read", d)
		}
		labels := regexp.MustCompile(`\w+`).FindAllString(parts[3], -1)
		for _, c := range regexp.MustCompile(`(\w+)=`).FindAllStringSubmatch(parts[2], -1) {
			labels = append(labels, c[1])
		}
		found[parts[1]] = labels
	}
	return found
}

// targetLabels are those that the jobs of scrape.yaml give to all metrics.
func targetLabels(t *testing.T) []string {
	t.Helper()
	var conf struct {
		ScrapeConfigs []struct {
			JobName        string `json:"job_name"`
			HonorLabels    bool   `json:"honor_labels"`
			RelabelConfigs []struct {
				Source        []string `json:"source_labels"`
				Target        string   `json:"target_label"`
				Regex, Action string
			} `json:"relabel_configs"`
			Discovery []map[string]any `json:"kubernetes_sd_configs"`
		} `json:"scrape_configs"`
	}
	testkit.Check(t, yaml.UnmarshalStrict(monitoring(t, "scrape.yaml"), &conf))
	labels := map[string]bool{"job": true, "instance": true}
	for _, c := range conf.ScrapeConfigs {
		if c.JobName == "" || len(c.Discovery) == 0 {
			t.Errorf("job %q finds no target", c.JobName)
		}
		for _, r := range c.RelabelConfigs {
			if _, err := regexp.Compile(r.Regex); err != nil {
				t.Error(err)
			}
			if r.Target != "" {
				labels[r.Target] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(labels))
}

var (
	token     = regexp.MustCompile(`[a-zA-Z_:][\w:]*|\d+(?:\.\d+)?[smhdwy]?|"[^"]*"|==|!=|>=|<=|=~|!~|[-+*/^%(){}\[\],<>=]|\s+|.`)
	name      = regexp.MustCompile(`^[a-zA-Z_:]`)
	functions = []string{"absent", "increase", "max", "min", "rate", "sum"}
	operators = []string{"and", "or", "unless"}
	grouping  = []string{"by", "without", "on", "ignoring"}
	pairs     = map[string]string{")": "(", "}": "{", "]": "["}
)

// expression is what an expression of PromQL is about. It is no more than a look at its words:
// what is evaluated isn't known.
type expression struct {
	metrics []string
	// labels are those that it selects or groups by.
	labels []string
}

func parseExpression(text string) (e expression, err error) {
	var words, open []string
	for _, w := range token.FindAllString(text, -1) {
		if strings.TrimSpace(w) != "" {
			words = append(words, w)
		}
	}
	grouped := false // the words are within the parentheses of "by"
	for i, w := range words {
		next := ""
		if i+1 < len(words) {
			next = words[i+1]
		}
		last := ""
		if len(open) > 0 {
			last = open[len(open)-1]
		}
		switch {
		case w == "(" || w == "{" || w == "[":
			open = append(open, w)
			grouped = i > 0 && slices.Contains(grouping, words[i-1])
		case pairs[w] != "":
			if last != pairs[w] {
				return e, fmt.Errorf("%q closes %q", w, last)
			}
			open, grouped = open[:len(open)-1], false
		case last == "[":
			if _, err := time.ParseDuration(w); err != nil {
				return e, err
			}
		case !name.MatchString(w):
			if !regexp.MustCompile(`^(\d|"|==|!=|>=|<=|=~|!~|[-+*/^%,<>=]$)`).MatchString(w) {
				return e, fmt.Errorf("%q isn't of the language", w)
			}
		case last == "{" || grouped:
			e.labels = append(e.labels, w)
		case slices.Contains(grouping, w) && next == "(", slices.Contains(operators, w) && next != "":
		case next == "(" || next == "by":
			if !slices.Contains(functions, w) {
				return e, fmt.Errorf("function %s isn't known", w)
			}
		default:
			e.metrics = append(e.metrics, w)
		}
	}
	if len(open) > 0 {
		return e, fmt.Errorf("%q isn't closed", open)
	}
	if len(e.metrics) == 0 {
		return e, fmt.Errorf("it is about no metric")
	}
	return e, nil
}

func TestParseExpression(t *testing.T) {
	for text, want := range map[string]string{
		`up{job="coil"} == 0`:                           "[up] [job]",
		`max by (pool) (a) / max by (pool) (b) > 0.9`:   "[a b] [pool pool]",
		`rate(a{x=~"y",z!="w"}[5m]) > 0 or rate(b[1h])`: "[a b] [x z]",
		`sum (a) unless b`:                              "[a b] []",
		`max by (pool (a)`:                              `["("] isn't closed`,
		`a)`:                                            `")" closes ""`,
		`a{b="c"`:                                       `["{"] isn't closed`,
		`rates(a[5m])`:                                  "function rates isn't known",
		`rate(a[5 m])`:                                  `time: missing unit in duration "5"`,
		`a & b`:                                         `"&" isn't of the language`,
		`1 > 0`:                                         "it is about no metric",
	} {
		e, err := parseExpression(text)
		got := fmt.Sprint(e.metrics, " ", e.labels)
		if err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
}

// Alerts are about metrics and labels that there are, and say what to do.
func TestAlerts(t *testing.T) {
	var file rules
	testkit.Check(t, yaml.UnmarshalStrict(monitoring(t, "rules.yaml"), &file))
	known, target := registered(t), targetLabels(t)
	seen := map[string]bool{}
	for _, group := range file.Groups {
		for _, a := range group.Rules {
			if a.Alert == "" || seen[a.Alert] {
				t.Errorf("alert %q is there twice, or has no name", a.Alert)
			}
			seen[a.Alert] = true
			if _, err := time.ParseDuration(a.For); err != nil {
				t.Errorf("%s: %v", a.Alert, err)
			}
			if !slices.Contains([]string{"warning", "critical"}, a.Labels["severity"]) {
				t.Errorf("%s: severity %q", a.Alert, a.Labels["severity"])
			}
			e, err := parseExpression(a.Expr)
			if err != nil {
				t.Errorf("%s: %v", a.Alert, err)
				continue
			}
			labels := slices.Clone(target)
			for _, m := range e.metrics {
				if _, ok := known[m]; !ok {
					t.Errorf("%s: nobody registers %s", a.Alert, m)
				}
				labels = append(labels, known[m]...)
			}
			for _, l := range e.labels {
				if !slices.Contains(labels, l) {
					t.Errorf("%s: %v have no label %s", a.Alert, e.metrics, l)
				}
			}
			if strings.Contains(a.Expr, " by ") {
				labels = e.labels // of the others nothing is left
			}
			for _, key := range []string{"summary", "description"} {
				if a.Annotations[key] == "" {
					t.Errorf("%s has no %s", a.Alert, key)
				}
				if err := annotation(a.Annotations[key], labels); err != nil {
					t.Errorf("%s: %s: %v", a.Alert, key, err)
				}
			}
		}
	}
	if len(seen) == 0 {
		t.Error("there is no alert")
	}
}

// annotation fills a template in, as Prometheus does, where only these labels are.
func annotation(text string, labels []string) error {
	values := map[string]string{}
	for _, l := range labels {
		values[l] = "x"
	}
	parsed, err := template.New("").Option("missingkey=error").Parse("{{$labels := .}}" + text)
	if err != nil {
		return err
	}
	return parsed.Execute(new(strings.Builder), values)
}
