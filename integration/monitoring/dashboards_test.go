package monitoring

import (
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/integration/monitoring/draw"
	"github.com/coil-net/coil/pkg/testkit"
)

// dashboards returns those of manifests/monitoring by the names of their files.
func dashboards(t *testing.T) map[string]draw.Dashboard {
	t.Helper()
	all := map[string]draw.Dashboard{}
	for _, path := range testkit.Must(filepath.Glob(filepath.Join(folder, "dashboards/*.json")))(t) {
		all[strings.TrimSuffix(filepath.Base(path), ".json")] = testkit.Must(draw.Read(path))(t)
	}
	return all
}

// usual is the window in which Grafana shows a dashboard at first.
var usual = draw.Window{From: time.Unix(0, 0), To: time.Unix(6*3600, 0), Step: time.Minute, Rate: 5 * time.Minute}

// A dashboard shows metrics that there are, and tells what it shows, in which unit and when that is bad. It works with any Prometheus.
func TestDashboards(t *testing.T) {
	q := newQueries(t)
	uids := map[string]bool{}
	all := dashboards(t)
	for _, audience := range []string{"addresses", "egress", "node", "services"} {
		if _, ok := all[audience]; !ok {
			t.Errorf("there is no dashboard %s", audience)
		}
	}
	for name, d := range all {
		t.Run(name, func(t *testing.T) {
			if d.UID != "coil-"+name || uids[d.UID] || d.Title == "" || d.Description == "" || d.SchemaVersion < 39 {
				t.Errorf("uid %q, title %q, description %q, schema %d", d.UID, d.Title, d.Description, d.SchemaVersion)
			}
			uids[d.UID] = true
			for _, uid := range regexp.MustCompile(`"uid": "([^"]*)"`).FindAllStringSubmatch(string(monitoring(t, "dashboards/"+name+".json")), -1) {
				if uid[1] != d.UID && uid[1] != "${datasource}" {
					t.Errorf("the UID %q is of one Grafana only", uid[1])
				}
			}
			variables := checkVariables(t, q, d)
			ids := map[int]bool{}
			for _, p := range d.Panels {
				if ids[p.ID] || p.Title == "" {
					t.Errorf("panel %d %q: the ID is there twice, or it has no title", p.ID, p.Title)
				}
				ids[p.ID] = true
				if p.Type != "row" {
					t.Run(p.Title, func(t *testing.T) { checkPanel(t, q, p, variables) })
				}
			}
			checkPlaces(t, d.Panels)
		})
	}
}

// checkVariables returns the names of the variables that users choose.
func checkVariables(t *testing.T, q queries, d draw.Dashboard) (names []string) {
	t.Helper()
	form := regexp.MustCompile(`^label_values\((.+), (\w+)\)$`)
	for _, v := range d.Templating.List {
		if v.Type == "datasource" {
			if v.Name != "datasource" || v.Query != "prometheus" {
				t.Errorf("variable %s chooses %v", v.Name, v.Query)
			}
			continue
		}
		parts := form.FindStringSubmatch(v.Definition)
		if parts == nil {
			t.Errorf("variable %s: %s", v.Name, v.Definition)
			continue
		}
		labels, err := q.check(parts[1])
		if err != nil || !slices.Contains(labels, parts[2]) {
			t.Errorf("variable %s: %v; %s has the labels %v", v.Name, err, parts[1], labels)
		}
		for _, c := range draw.Chosen.FindAllStringSubmatch(parts[1], -1) {
			if !slices.Contains(names, c[1]) {
				t.Errorf("variable %s comes before %s", v.Name, c[1])
			}
		}
		names = append(names, v.Name)
	}
	return names
}

func checkPanel(t *testing.T, q queries, p draw.Panel, variables []string) {
	if p.Description == "" || p.FieldConfig.Defaults.Unit == "" || len(p.FieldConfig.Defaults.Thresholds.Steps) == 0 {
		t.Errorf("description %q, unit %q, thresholds %v", p.Description, p.FieldConfig.Defaults.Unit, p.FieldConfig.Defaults.Thresholds)
	}
	if !strings.HasSuffix(p.Description, ".") {
		t.Errorf("the description is no sentence: %q", p.Description)
	}
	for i, s := range p.FieldConfig.Defaults.Thresholds.Steps {
		if (s.Value == nil) != (i == 0) || i > 1 && *s.Value <= *p.FieldConfig.Defaults.Thresholds.Steps[i-1].Value {
			t.Errorf("step %d of the thresholds isn't above the one before", i)
		}
	}
	if len(p.Targets) == 0 {
		t.Error("it has no query")
	}
	for _, target := range p.Targets {
		labels, err := q.check(usual.Resolve(target.Expr))
		if err != nil {
			t.Errorf("%s: %v", target.Expr, err)
		}
		for _, l := range regexp.MustCompile(`\{\{(\w+)\}\}`).FindAllStringSubmatch(target.LegendFormat, -1) {
			if !slices.Contains(labels, l[1]) {
				t.Errorf("%s: the legend names %s, and there are %v", target.Expr, l[1], labels)
			}
		}
		for _, l := range labels {
			if p.Type != "stat" && !strings.Contains(target.LegendFormat, "{{"+l+"}}") && !slices.Contains([]string{"namespace", "egress"}, l) {
				t.Errorf("%s: the legend doesn't tell series apart that differ in %s", target.Expr, l)
			}
		}
		for _, c := range draw.Chosen.FindAllStringSubmatch(target.Expr, -1) {
			if !slices.Contains(variables, c[1]) {
				t.Errorf("%s: there is no variable %s", target.Expr, c[1])
			}
		}
	}
}

// checkPlaces looks whether panels cover each other, or leave the page.
func checkPlaces(t *testing.T, panels []draw.Panel) {
	t.Helper()
	taken := map[[2]int]int{}
	for _, p := range panels {
		if p.GridPos.X+p.GridPos.W > 24 || p.GridPos.W < 4 || p.GridPos.H < 1 {
			t.Errorf("panel %q is at %v", p.Title, p.GridPos)
		}
		for x := range p.GridPos.W {
			for y := range p.GridPos.H {
				at := [2]int{p.GridPos.X + x, p.GridPos.Y + y}
				if other, ok := taken[at]; ok {
					t.Fatalf("panels %d and %d are in one place", other, p.ID)
				}
				taken[at] = p.ID
			}
		}
	}
}
