package monitoring

import (
	"os"
	"os/exec"
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

// Alerts are about metrics and labels that there are, say what to do, and lead to their section of the page about them.
func TestAlerts(t *testing.T) {
	q, sections := newQueries(t), runbook(t)
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
			if got, want := a.Annotations["runbook_url"], "https://github.com/coil-net/coil/blob/main/manifests/monitoring/RUNBOOK.md#"+anchor(a.Alert); got != want {
				t.Errorf("runbook_url: %s, want %s", got, want)
			}
			if _, ok := sections[a.Alert]; !ok {
				t.Error("RUNBOOK.md has no section of it")
			}
		})
	}
	for name := range sections {
		if !seen[name] {
			t.Errorf("RUNBOOK.md has a section of %s, which is no alert", name)
		}
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

// anchor is what leads to a heading on a page, as GitHub makes it.
func anchor(heading string) string {
	return strings.ReplaceAll(regexp.MustCompile(`[^\w -]`).ReplaceAllLiteralString(strings.ToLower(heading), ""), " ", "-")
}

// Links of the pages lead to files, and to headings in them.
func TestLinks(t *testing.T) {
	heading := regexp.MustCompile(`(?m)^#+ (.+)$`)
	for _, page := range testkit.Must(filepath.Glob(filepath.Join(folder, "*.md")))(t) {
		for _, link := range regexp.MustCompile(`\]\(([^):#]*)(?:#([^)]+))?\)`).FindAllStringSubmatch(string(testkit.Must(os.ReadFile(page))(t)), -1) {
			to := page
			if link[1] != "" {
				to = filepath.Join(folder, link[1])
			}
			if _, err := os.Stat(to); err != nil || link[2] == "" {
				testkit.Check(t, err)
				continue
			}
			if !slices.ContainsFunc(heading.FindAllStringSubmatch(string(testkit.Must(os.ReadFile(to))(t)), -1), func(h []string) bool { return anchor(h[1]) == link[2] }) {
				t.Errorf("%s: %s has no heading for #%s", page, to, link[2])
			}
		}
	}
}

// parts begin the paragraphs of each section of RUNBOOK.md.
var parts = []string{"**It means**", "**Clients feel**", "**Look at**", "**Do**"}

// runbook returns the sections of RUNBOOK.md by their alerts.
func runbook(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, section := range strings.Split(string(monitoring(t, "RUNBOOK.md")), "\n### ")[1:] {
		section, _, _ = strings.Cut(section, "\n## ")
		name, text, _ := strings.Cut(section, "\n")
		if _, twice := all[name]; twice {
			t.Errorf("RUNBOOK.md has two sections of %s", name)
		}
		all[name] = text
		var begun []string
		for _, b := range regexp.MustCompile(`(?m)^- (\*\*[^*]+\*\*) \S`).FindAllStringSubmatch(text, -1) {
			begun = append(begun, b[1])
		}
		if !slices.Equal(begun, parts) {
			t.Errorf("RUNBOOK.md, %s: the parts are %q, not %q", name, begun, parts)
		}
	}
	return all
}

// promtool runs Prometheus's own tool, which Debian's package prometheus has.
func promtool(t *testing.T, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "promtool", args...)
	if _, err := os.Stat("/dev/shm"); err == nil {
		cmd.Env = append(os.Environ(), "TMPDIR=/dev/shm") // it makes a database for each test, and syncs it to the disk
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("promtool %s: %v (hack/setup.sh test installs it)\n%s", strings.Join(args, " "), err, out)
	}
}

// Each alert fires, and is quiet, in the file of its tests, which promtool runs.
func TestAlertsFire(t *testing.T) {
	testkit.Need(t, testkit.Netns) // whose machines have the packages of hack/setup.sh
	promtool(t, "check", "rules", filepath.Join(folder, "rules.yaml"))
	promtool(t, append([]string{"test", "rules"}, testFiles(t)...)...)
}

// testFiles are the files of promtool's tests.
func testFiles(t *testing.T) []string {
	t.Helper()
	files := testkit.Must(filepath.Glob("testdata/*.yaml"))(t)
	if len(files) == 0 {
		t.Fatal("there are no tests of alerts")
	}
	return files
}

func TestAlertsAreTested(t *testing.T) {
	fires, quiet := map[string]bool{}, map[string]bool{}
	of := regexp.MustCompile(`^ALERTS\{alertname="(\w+)", alertstate="firing"\}$`)
	for _, name := range testFiles(t) {
		var file struct {
			Tests []struct {
				Cases []struct {
					Expr    string
					Samples []struct{ Labels string } `json:"exp_samples"`
				} `json:"promql_expr_test"`
			}
		}
		testkit.Check(t, yaml.Unmarshal(testkit.Must(os.ReadFile(name))(t), &file))
		for _, test := range file.Tests {
			for _, c := range test.Cases {
				name := of.FindStringSubmatch(c.Expr)
				switch {
				case name == nil:
					t.Errorf("%s isn't about alerts that fire", c.Expr)
				case len(c.Samples) > 0:
					fires[name[1]] = true
				default:
					quiet[name[1]] = true
				}
			}
		}
	}
	for _, a := range alerts(t) {
		if !fires[a.Alert] || !quiet[a.Alert] {
			t.Errorf("%s fires in a test: %t; is quiet in one: %t", a.Alert, fires[a.Alert], quiet[a.Alert])
		}
		delete(fires, a.Alert)
	}
	for name := range fires {
		t.Errorf("there is no alert %s", name)
	}
}
