package monitoring

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"

	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/pkg/testkit"
)

var update = flag.Bool("update", false, "write the golden files, and the pictures of dashboards")

// podMonitor is a PodMonitor of monitoring.coreos.com/v1, as far as Coil uses it.
type podMonitor struct {
	Metadata struct{ Name, Namespace string }
	Spec     struct {
		NamespaceSelector struct {
			Any        bool
			MatchNames []string
		}
		Selector            struct{ MatchLabels map[string]string }
		PodMetricsEndpoints []struct {
			Port        string
			HonorLabels bool
			Relabelings []struct {
				Action, Regex, TargetLabel, Replacement string
				SourceLabels                            []string
			}
		}
	}
}

// render returns the objects that kubectl makes of a folder of manifests/monitoring.
func render(t *testing.T, dir string) (all []*unstructured.Unstructured) {
	t.Helper()
	testkit.Need(t, testkit.APIServer) // which builds kubectl
	b := build.Builder{Log: t.Output()}
	programs := testkit.Must(b.Programs(t.Context(), "kubectl"))(t)
	out := testkit.Must(exec.CommandContext(t.Context(), programs["kubectl"], "kustomize", filepath.Join(folder, dir)).Output())(t)
	for dec := utilyaml.NewYAMLOrJSONDecoder(bytes.NewReader(out), 4096); ; {
		u := &unstructured.Unstructured{}
		if err := dec.Decode(u); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, u)
	}
}

// golden compares a text with a file of testdata.
func golden(t *testing.T, file, got string) {
	t.Helper()
	path := filepath.Join("testdata", file)
	if *update {
		testkit.Check(t, os.WriteFile(path, []byte(got), 0o644))
	}
	if diff := cmp.Diff(string(testkit.Must(os.ReadFile(path))(t)), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", path, diff)
	}
}

// The operator gets the same alerts as Prometheus itself, and PodMonitors that are as they were reviewed.
func TestRenderOperator(t *testing.T) {
	var want map[string]any
	testkit.Check(t, yaml.Unmarshal(monitoring(t, "rules.yaml"), &want))
	var monitors strings.Builder
	rules := 0
	for _, u := range render(t, "operator") {
		switch u.GetKind() {
		case "PodMonitor":
			fmt.Fprintf(&monitors, "---\n%s", testkit.Must(yaml.Marshal(u.Object))(t))
		case "PrometheusRule":
			rules++
			if diff := cmp.Diff(want, u.Object["spec"]); diff != "" {
				t.Errorf("rules (-want +got):\n%s", diff)
			}
		default:
			t.Errorf("%s %s", u.GetKind(), u.GetName())
		}
	}
	if rules != 1 {
		t.Errorf("there are %d PrometheusRules", rules)
	}
	golden(t, "podmonitors.golden", monitors.String())
}

// A ConfigMap has each dashboard as it is, and the label by which Grafana's sidecar finds it.
func TestRenderDashboards(t *testing.T) {
	want := map[string]string{}
	for name := range dashboards(t) {
		want["coil-"+name+".json"] = string(monitoring(t, "dashboards/"+name+".json"))
	}
	got := map[string]string{}
	for _, u := range render(t, "dashboards") {
		data, _, err := unstructured.NestedStringMap(u.Object, "data")
		if err != nil || u.GetKind() != "ConfigMap" || u.GetLabels()["grafana_dashboard"] != "1" || u.GetNamespace() != "kube-system" || len(data) != 1 {
			t.Errorf("%s %s/%s, labels %v: %v", u.GetKind(), u.GetNamespace(), u.GetName(), u.GetLabels(), err)
		}
		maps.Copy(got, data)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("dashboards (-want +got):\n%s", diff)
	}
}

// Metrics have the same labels whether Prometheus reads scrape.yaml or the operator's PodMonitors.
func TestPodMonitorsAreTheJobs(t *testing.T) {
	exported := exported(t)
	monitors := map[string]podMonitor{}
	for _, doc := range strings.Split(string(monitoring(t, "operator/podmonitors.yaml")), "\n---\n") {
		var m podMonitor
		testkit.Check(t, yaml.Unmarshal([]byte(doc), &m))
		monitors[m.Metadata.Name] = m
	}
	for _, job := range scrapes(t) {
		m, ok := monitors[job.JobName]
		if !ok || len(m.Spec.PodMetricsEndpoints) != 1 {
			t.Errorf("job %s has no PodMonitor with one endpoint", job.JobName)
			continue
		}
		delete(monitors, job.JobName)
		e := m.Spec.PodMetricsEndpoints[0]
		// The operator's own, and those that relabelings make.
		labels := map[string]string{"namespace": "", "container": "", "pod": "", "endpoint": "", "instance": ""}
		for _, r := range e.Relabelings {
			if r.Action == "replace" {
				labels[r.TargetLabel] = strings.Join(r.SourceLabels, ";") + r.Replacement
			}
		}
		want := map[string]string{"job": job.JobName}
		for _, r := range job.RelabelConfigs {
			if r.Target != "" {
				want[r.Target] = strings.Join(r.Source, ";")
			}
		}
		for l, from := range want {
			if labels[l] != from {
				t.Errorf("%s: the label %s is of %q, want %q", job.JobName, l, labels[l], from)
			}
		}
		for name, metric := range exported {
			if i := slices.IndexFunc(metric.labels, func(l string) bool { _, ok := labels[l]; return ok }); i >= 0 && !e.HonorLabels {
				t.Errorf("%s: %s would lose its label %s to the target's", job.JobName, name, metric.labels[i])
			}
		}
		selector := job.Discovery[0]["selectors"].([]any)[0].(map[string]any)["label"].(string)
		var selected []string
		for k, v := range m.Spec.Selector.MatchLabels {
			selected = append(selected, k+"="+v)
		}
		if want := strings.Split(selector, ","); !slices.Equal(sorted(want), sorted(selected)) {
			t.Errorf("%s selects %v, want %v", job.JobName, selected, want)
		}
		namespaces := []any{}
		for _, n := range m.Spec.NamespaceSelector.MatchNames {
			namespaces = append(namespaces, n)
		}
		if within, ok := job.Discovery[0]["namespaces"].(map[string]any); ok == m.Spec.NamespaceSelector.Any || ok && !cmp.Equal(within["names"], any(namespaces)) {
			t.Errorf("%s: namespaces %v, want %v", job.JobName, m.Spec.NamespaceSelector, within)
		}
		if e.Port != "metrics" {
			t.Errorf("%s: port %s", job.JobName, e.Port)
		}
	}
	for name := range monitors {
		t.Errorf("there is no job for the PodMonitor %s", name)
	}
}
