package monitoring

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"text/template"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/coil-net/coil/pkg/testkit"
)

// folder is where what is checked here is.
const folder = root + "/manifests/monitoring"

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
	return testkit.Must(os.ReadFile(filepath.Join(folder, file)))(t)
}

// alerts returns those of rules.yaml.
func alerts(t *testing.T) (all []alert) {
	t.Helper()
	var file rules
	testkit.Check(t, yaml.UnmarshalStrict(monitoring(t, "rules.yaml"), &file))
	for _, g := range file.Groups {
		all = append(all, g.Rules...)
	}
	if len(all) == 0 {
		t.Fatal("there is no alert")
	}
	return all
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

// Alerts are about metrics and labels that there are, and say what to do.
func TestAlerts(t *testing.T) {
	q := newQueries(t)
	seen := map[string]bool{}
	for _, a := range alerts(t) {
		t.Run(a.Alert, func(t *testing.T) {
			if a.Alert == "" || seen[a.Alert] {
				t.Error("it is there twice, or has no name")
			}
			seen[a.Alert] = true
			if _, err := time.ParseDuration(a.For); err != nil {
				t.Error(err)
			}
			if !slices.Contains([]string{"warning", "critical"}, a.Labels["severity"]) {
				t.Errorf("severity %q", a.Labels["severity"])
			}
			labels, err := q.check(a.Expr)
			if err != nil {
				t.Error(err)
			}
			for _, key := range []string{"summary", "description"} {
				if a.Annotations[key] == "" {
					t.Errorf("it has no %s", key)
				}
				if err := annotation(a.Annotations[key], labels); err != nil {
					t.Errorf("%s: %v", key, err)
				}
			}
		})
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
