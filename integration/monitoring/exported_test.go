// Package monitoring checks manifests/monitoring: alerts, their tests and the page about them, dashboards, and how Prometheus finds
// programs.
//
// It knows which metrics programs export, with their labels and types. It must not know what a metric is good for.
package monitoring

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/testkit"
)

const root = "../.."

// kind is the type of a metric.
type kind string

const (
	counter   kind = "counter"
	gauge     kind = "gauge"
	histogram kind = "histogram"
)

// metric is what programs export under a name.
type metric struct {
	kind   kind
	labels []string // sorted
}

// exported returns the metrics of all programs by name: those that are registered here as programs do it, and those that the sources
// define in one expression.
//
// A description has no type. Names that end with _total are counters', and no others; TestExported holds the sources to that.
func exported(t *testing.T) map[string]metric {
	t.Helper()
	all := defined(t)
	for name, labels := range registered(t) {
		m := metric{gauge, slices.AppendSeq([]string{}, slices.Values(labels))}
		slices.Sort(m.labels)
		if strings.HasSuffix(name, "_total") {
			m.kind = counter
		}
		if own, ok := all[name]; ok {
			m.kind = own.kind
		}
		if m.kind == histogram {
			m.labels = slices.DeleteFunc(m.labels, func(l string) bool { return l == "le" })
		}
		all[name] = m
	}
	for name, m := range all {
		if m.labels == nil {
			t.Errorf("the labels of %s are put together while a program runs: register it as one does", name)
		}
	}
	return all
}

var (
	constructor = regexp.MustCompile(`^New(Counter|Gauge|Histogram)(Vec|Func)?$`)
	metricName  = regexp.MustCompile(`^coil_[a-z0-9_]+$`)
	// Names of tables and links have fewer words.
	metricWord = regexp.MustCompile("`(coil_[a-z0-9]+_[^`*]+)`")
)

// defined returns the metrics that sources name. Those whose labels are no constants have nil.
func defined(t *testing.T) map[string]metric {
	t.Helper()
	all := map[string]metric{}
	sources(t, func(n ast.Node) {
		if call, ok := n.(*ast.CallExpr); ok {
			if name, m, ok := definition(call); ok {
				if _, twice := all[name]; twice {
					t.Errorf("%s is defined twice", name)
				}
				all[name] = m
			}
		}
	})
	return all
}

// words returns all texts of the sources.
func words(t *testing.T) map[string]bool {
	t.Helper()
	all := map[string]bool{}
	sources(t, func(n ast.Node) {
		if lit, ok := n.(*ast.BasicLit); ok {
			if s, ok := text(lit); ok {
				all[s] = true
			}
		}
	})
	return all
}

// sources visits each node of the syntax of product code.
func sources(t *testing.T, visit func(ast.Node)) {
	t.Helper()
	fset := token.NewFileSet()
	testkit.Check(t, filepath.WalkDir(filepath.Join(root, "pkg"), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		f, err := parser.ParseFile(fset, path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		ast.Inspect(f, func(n ast.Node) bool {
			visit(n)
			return true
		})
		return nil
	}))
}

// definition returns the metric that a call defines, if it has its name.
func definition(call *ast.CallExpr) (string, metric, bool) {
	f, ok := call.Fun.(*ast.SelectorExpr)
	if !ok || len(call.Args) == 0 {
		return "", metric{}, false
	}
	if f.Sel.Name == "NewDesc" && len(call.Args) == 4 {
		name, ok := text(call.Args[0])
		m := metric{kind: gauge, labels: together(call.Args[2], call.Args[3])}
		if strings.HasSuffix(name, "_total") {
			m.kind = counter
		}
		return name, m, ok
	}
	parts := constructor.FindStringSubmatch(f.Sel.Name)
	options, ok := call.Args[0].(*ast.CompositeLit)
	if parts == nil || !ok {
		return "", metric{}, false
	}
	var name string
	var always ast.Expr = ast.NewIdent("nil")
	for _, e := range options.Elts {
		if kv, ok := e.(*ast.KeyValueExpr); ok {
			switch kv.Key.(*ast.Ident).Name {
			case "Name":
				name, _ = text(kv.Value)
			case "ConstLabels":
				always = kv.Value
			}
		}
	}
	var variable ast.Expr = ast.NewIdent("nil")
	if parts[2] == "Vec" {
		variable = call.Args[1]
	}
	return name, metric{kind(strings.ToLower(parts[1])), together(variable, always)}, metricName.MatchString(name)
}

func text(e ast.Expr) (string, bool) {
	lit, ok := e.(*ast.BasicLit)
	if !ok || lit.Kind != token.STRING {
		return "", false
	}
	s, err := strconv.Unquote(lit.Value)
	return s, err == nil
}

// together returns the constants of lists and maps, sorted, or nil if there is something else.
func together(lists ...ast.Expr) []string {
	all := []string{}
	for _, e := range lists {
		if id, ok := e.(*ast.Ident); ok && id.Name == "nil" {
			continue
		}
		lit, ok := e.(*ast.CompositeLit)
		if !ok {
			return nil
		}
		for _, item := range lit.Elts {
			if kv, ok := item.(*ast.KeyValueExpr); ok {
				item = kv.Key
			}
			s, ok := text(item)
			if !ok {
				return nil
			}
			all = append(all, s)
		}
	}
	slices.Sort(all)
	return all
}

// The list is complete, and has what it says.
func TestExported(t *testing.T) {
	all := exported(t)
	for name, m := range all {
		if total := strings.HasSuffix(name, "_total"); total != (m.kind == counter) {
			t.Errorf("%s is a %s: counters' names end with _total, and no others", name, m.kind)
		}
	}
	for name, want := range map[string]metric{
		"coil_controller_max_blocks":               {gauge, []string{"pool"}},
		"coil_reconcile_duration_seconds":          {histogram, []string{"loop"}},
		"coil_egress_nftables_dropped_bytes_total": {counter, []string{"egress", "namespace", "pod", "protocol", "reason"}},
		"coil_egress_client_latency_seconds":       {histogram, []string{"egress", "namespace", "pod"}},
		"coil_router_routes_synced":                {gauge, []string{"node"}},
		"coil_lb_gateway_dropped_packets_total":    {counter, []string{"family", "reason"}},
		"coil_source_guard_dropped_packets_total":  {counter, []string{"family"}},
		"coil_node_missing_blocks":                 {gauge, []string{}},
		"go_goroutines":                            {gauge, []string{}},
	} {
		if diff := cmp.Diff(fmt.Sprint(want), fmt.Sprint(all[name])); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// ofRouters are labels of most metrics of routers of Egresses, which their page says apart.
var ofRouters = []string{"egress", "namespace", "pod"}

// Pages of programs tell of all metrics, each with its labels, and of no others.
func TestPagesTellOfMetrics(t *testing.T) {
	all := exported(t)
	told := map[string]bool{}
	for _, page := range testkit.Must(filepath.Glob(filepath.Join(root, "cmd/*/README.md")))(t) {
		for _, words := range metricWord.FindAllStringSubmatch(string(testkit.Must(os.ReadFile(page))(t)), -1) {
			for _, word := range alternatives(words[1]) {
				name, said, _ := strings.Cut(word, "{")
				m, ok := all[name]
				if !ok {
					t.Errorf("%s: no program exports %s", page, name)
					continue
				}
				told[name] = true
				if said == "" || strings.Contains(said, "=") {
					continue
				}
				labels := slices.Sorted(slices.Values(strings.Split(strings.TrimSuffix(said, "}"), ",")))
				if !slices.Equal(labels, m.labels) && !slices.Equal(slices.Sorted(slices.Values(slices.Concat(labels, ofRouters))), m.labels) {
					t.Errorf("%s: %s has the labels %v, not %v", page, name, m.labels, labels)
				}
			}
		}
	}
	for name := range all {
		if metricName.MatchString(name) && !told[name] {
			t.Errorf("no page of a program tells of %s", name)
		}
	}
}

// alternatives are the names that name_{a,b}_rest stands for.
func alternatives(name string) []string {
	parts := regexp.MustCompile(`^(\w+_)\{([\w,]+)\}(_\w+.*|$)`).FindStringSubmatch(name)
	if parts == nil {
		return []string{name}
	}
	var all []string
	for _, middle := range strings.Split(parts[2], ",") {
		all = append(all, parts[1]+middle+parts[3])
	}
	return all
}
