package monitoring

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"
	"google.golang.org/grpc/codes"

	"github.com/coil-net/coil/pkg/testkit"
)

// queries checks expressions of PromQL.
type queries struct {
	metrics map[string]metric
	// target are the labels that Prometheus gives to all metrics.
	target []string
	// values says whether any program may export a value of a label.
	values func(label, value string) bool
}

func newQueries(t *testing.T) queries {
	t.Helper()
	texts, components, jobs := words(t), components(t), jobs(t)
	q := queries{exported(t), targetLabels(t), func(label, value string) bool {
		switch label {
		case "job":
			return slices.Contains(jobs, value)
		case "component":
			return slices.Contains(components, value)
		case "code":
			return value == codes.OK.String()
		}
		return texts[value]
	}}
	q.metrics["up"] = metric{kind: gauge} // Prometheus's own
	return q
}

// components returns the values of the label by which manifests tell programs apart.
func components(t *testing.T) (all []string) {
	t.Helper()
	for _, file := range testkit.Must(filepath.Glob(filepath.Join(root, "manifests/*/*.yaml")))(t) {
		for _, c := range regexp.MustCompile(`app.kubernetes.io/component: (\S+)`).FindAllStringSubmatch(string(testkit.Must(os.ReadFile(file))(t)), -1) {
			all = append(all, c[1])
		}
	}
	return all
}

// nameLabel is the label that a name is a matcher of.
const nameLabel = "__name__"

// Functions by what they are for.
var (
	ofCounters = []string{"increase", "irate", "rate", "resets"}
	ofGauges   = []string{"delta", "deriv", "idelta", "predict_linear", "avg_over_time", "max_over_time", "min_over_time"}
)

// check returns the labels that the result of an expression has, sorted. It is an error if programs export no such metric, or none with
// the labels by which is selected, grouped or matched; if a function isn't for the type of a metric; and if the labels of two sides differ, so
// that nothing would come out.
func (q queries) check(text string) ([]string, error) {
	expr, err := parser.ParseExpr(text)
	if err != nil {
		return nil, err
	}
	c := checker{queries: q}
	result := c.of(expr, "")
	return result, errors.Join(c.problems...)
}

type checker struct {
	queries
	problems []error
}

func (c *checker) problem(format string, args ...any) {
	c.problems = append(c.problems, fmt.Errorf(format, args...))
}

// of returns the labels of an expression, sorted. function is the one that it is the argument of.
func (c *checker) of(e parser.Expr, function string) []string {
	switch e := e.(type) {
	case *parser.ParenExpr:
		return c.of(e.Expr, function)
	case *parser.UnaryExpr:
		return c.of(e.Expr, "")
	case *parser.SubqueryExpr:
		if slices.Contains(ofCounters, function) {
			c.problem("%s of what was computed already: %s", function, e)
		}
		return c.of(e.Expr, "")
	case *parser.MatrixSelector:
		return c.of(e.VectorSelector, function)
	case *parser.VectorSelector:
		return c.selector(e, function)
	case *parser.AggregateExpr:
		return c.aggregate(e, function)
	case *parser.BinaryExpr:
		return c.binary(e)
	case *parser.Call:
		return c.call(e)
	case *parser.NumberLiteral, *parser.StringLiteral:
		return nil
	}
	c.problem("%T isn't known: %s", e, e)
	return nil
}

func (c *checker) selector(e *parser.VectorSelector, function string) []string {
	name, m, ok := c.find(e.Name)
	if !ok {
		c.problem("no program exports %q", e.Name)
		return nil
	}
	cumulative := m.kind == counter || m.kind == histogram
	switch {
	case cumulative && function == "":
		c.problem("%s is a %s: what it was at first is nothing to know", name, m.kind)
	case cumulative && slices.Contains(ofGauges, function), !cumulative && slices.Contains(ofCounters, function):
		c.problem("%s isn't for the %s %s", function, m.kind, name)
	}
	all := slices.Concat(m.labels, c.target)
	if m.kind == histogram && strings.HasSuffix(e.Name, "_bucket") {
		all = append(all, "le")
	}
	for _, l := range e.LabelMatchers {
		if l.Name == nameLabel {
			continue
		}
		if !slices.Contains(all, l.Name) {
			c.problem("%s has no label %s", e.Name, l.Name)
		}
		c.value(l)
	}
	return sorted(all)
}

// value looks at the value by which is selected. Those with $ are chosen by the user of a dashboard, perhaps several at once.
func (c *checker) value(l *labels.Matcher) {
	values := []string{l.Value}
	if l.Type == labels.MatchRegexp || l.Type == labels.MatchNotRegexp {
		values = strings.Split(l.Value, "|")
	}
	for _, v := range values {
		switch {
		case strings.HasPrefix(v, "$") && l.Type != labels.MatchRegexp:
			c.problem("%s has several values: use =~", v)
		case !strings.HasPrefix(v, "$") && !c.values(l.Name, v):
			c.problem("no program knows the value of %s", l)
		}
	}
}

// find returns the metric that has a series of this name.
func (c *checker) find(series string) (string, metric, bool) {
	if m, ok := c.metrics[series]; ok {
		return series, m, m.kind != histogram
	}
	for _, suffix := range []string{"_bucket", "_sum", "_count"} {
		if name, ok := strings.CutSuffix(series, suffix); ok && c.metrics[name].kind == histogram {
			return name, c.metrics[name], true
		}
	}
	return "", metric{}, false
}

func (c *checker) aggregate(e *parser.AggregateExpr, function string) []string {
	inner := c.of(e.Expr, function)
	for _, l := range e.Grouping {
		if !slices.Contains(inner, l) {
			c.problem("%s has no label %s", e.Expr, l)
		}
	}
	if function == "histogram_quantile" && slices.Contains(inner, "le") && slices.Contains(e.Grouping, "le") == e.Without {
		c.problem("histogram_quantile needs the label le of %s", e)
	}
	switch {
	case e.Op == parser.TOPK || e.Op == parser.BOTTOMK:
		return inner
	case e.Without:
		return without(inner, e.Grouping)
	}
	return sorted(e.Grouping)
}

func (c *checker) call(e *parser.Call) []string {
	name := e.Func.Name
	switch name {
	case "absent":
		c.of(e.Args[0], "")
		var all []string
		if v, ok := e.Args[0].(*parser.VectorSelector); ok { // of more than that Prometheus has no labels
			for _, l := range v.LabelMatchers {
				if l.Type == labels.MatchEqual && l.Name != nameLabel {
					all = append(all, l.Name)
				}
			}
		}
		return sorted(all)
	case "histogram_quantile":
		buckets := false
		parser.Inspect(e.Args[1], func(n parser.Node, _ []parser.Node) error {
			if v, ok := n.(*parser.VectorSelector); ok {
				_, m, _ := c.find(v.Name)
				buckets = m.kind == histogram && strings.HasSuffix(v.Name, "_bucket")
			}
			return nil
		})
		if !buckets {
			c.problem("histogram_quantile isn't about buckets: %s", e.Args[1])
		}
		return without(c.of(e.Args[1], name), []string{"le"})
	}
	var all []string
	for _, a := range e.Args {
		if a.Type() == parser.ValueTypeMatrix || a.Type() == parser.ValueTypeVector {
			inner := ""
			if a.Type() == parser.ValueTypeMatrix {
				inner = name
			}
			all = append(all, c.of(a, inner)...)
		}
	}
	return sorted(all)
}

func (c *checker) binary(e *parser.BinaryExpr) []string {
	left, right := c.of(e.LHS, ""), c.of(e.RHS, "")
	switch {
	case e.RHS.Type() == parser.ValueTypeScalar:
		return left
	case e.LHS.Type() == parser.ValueTypeScalar:
		return right
	}
	m := e.VectorMatching
	if m.On {
		for _, l := range m.MatchingLabels {
			if !slices.Contains(left, l) || !slices.Contains(right, l) {
				c.problem("%s: not both sides have the label %s", e, l)
			}
		}
	} else if a, b := without(left, m.MatchingLabels), without(right, m.MatchingLabels); e.Op != parser.LOR && !slices.Equal(a, b) {
		c.problem("%s: the sides have the labels %v and %v", e, a, b)
	}
	switch {
	case e.Op == parser.LOR: // what both have
		return slices.DeleteFunc(left, func(l string) bool { return !slices.Contains(right, l) })
	case e.Op == parser.LAND, e.Op == parser.LUNLESS:
		return left
	case m.Card == parser.CardManyToOne:
		return sorted(slices.Concat(left, m.Include))
	case m.Card == parser.CardOneToMany:
		return sorted(slices.Concat(right, m.Include))
	case m.On:
		return sorted(m.MatchingLabels)
	}
	return without(left, m.MatchingLabels)
}

func sorted(all []string) []string { return slices.Compact(slices.Sorted(slices.Values(all))) }

func without(all, some []string) []string {
	return slices.DeleteFunc(slices.Clone(all), func(l string) bool { return slices.Contains(some, l) })
}

func TestQueries(t *testing.T) {
	q := queries{map[string]metric{
		"gauge":    {gauge, []string{"pool"}},
		"other":    {gauge, []string{"pool", "state"}},
		"x_total":  {counter, []string{"kind"}},
		"duration": {histogram, []string{"loop"}},
		"plain":    {kind: gauge},
	}, []string{"job", "node"}, func(_, value string) bool { return value != "unknown" }}
	for text, want := range map[string]string{
		`gauge`:                         "[job node pool]",
		`gauge{job="coil",pool=~"a.*"}`: "[job node pool]",
		`max by (pool) (gauge) / on (pool) sum by (pool) (other) > 0.9`:          "[pool]",
		`sum without (state, node) (other)`:                                      "[job pool]",
		`gauge * on (node) group_left (state) max by (node, state) (other)`:      "[job node pool state]",
		`topk(3, rate(x_total[5m]))`:                                             "[job kind node]",
		`sum(rate(duration_sum[5m])) / sum(rate(duration_count[5m]))`:            "[]",
		`histogram_quantile(0.9, sum by (le, loop) (rate(duration_bucket[5m])))`: "[loop]",
		`predict_linear(max by (pool) (gauge)[6h:5m], 3600)`:                     "[pool]",
		`absent(plain{job="coil"} == 1)`:                                         "[]",
		`absent(plain{job="coil",node=~"a.*"})`:                                  "[job]",
		`max by (pool) (gauge) or max by (pool, state) (other)`:                  "[pool]",
		`clamp_min(sum by (pool) (gauge), 0)`:                                    "[pool]",
		`changes(x_total[5m])`:                                                   "[job kind node]",
		`sum by (pool (gauge)`:                                                   "parse error",
		`gage`:                                                                   `no program exports "gage"`,
		`gauge{pool=~"$pool"}`:                                                   "[job node pool]",
		`gauge{pool="$pool"}`:                                                    "$pool has several values",
		`gauge{pool=~"a|unknown"}`:                                               "no program knows the value of pool",
		`gauge{pool!="unknown"}`:                                                 "no program knows the value of pool",
		`gauge{kind="a"}`:                                                        "gauge has no label kind",
		`sum by (kind) (gauge)`:                                                  "gauge has no label kind",
		`x_total > 0`:                                                            "x_total is a counter",
		`sum by (kind) (x_total)`:                                                "x_total is a counter",
		`rate(gauge[5m])`:                                                        "rate isn't for the gauge gauge",
		`deriv(x_total[5m])`:                                                     "deriv isn't for the counter x_total",
		`rate(max by (pool) (gauge)[5m:1m])`:                                     "rate of what was computed already",
		`duration > 1`:                                                           `no program exports "duration"`,
		`rate(gauge_bucket[5m])`:                                                 `no program exports "gauge_bucket"`,
		`histogram_quantile(0.9, sum by (loop) (rate(duration_bucket[5m])))`:     "needs the label le",
		`histogram_quantile(0.9, sum without (le) (rate(duration_bucket[5m])))`:  "needs the label le",
		`histogram_quantile(0.9, rate(duration_sum[5m]))`:                        "isn't about buckets",
		`sum by (pool) (gauge) / sum(other)`:                                     "the sides have the labels [pool] and []",
		`gauge / on (state) other`:                                               "not both sides have the label state",
		`max by (pool) (gauge) > 0.9 and on (node) plain`:                        "not both sides have the label node",
		`sum by (node) (gauge) - sum by (node) (rate(x_total[5m])) unless sum by (pool) (gauge)`: "the sides have the labels [node] and [pool]",
	} {
		labels, err := q.check(text)
		if got := fmt.Sprint(labels); err == nil && got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
		if err != nil && (strings.HasPrefix(want, "[") || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
}
