package monitoring

import (
	"maps"
	"regexp"
	"slices"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/coil-net/coil/pkg/testkit"
)

// scrapeConfig is what scrape.yaml may say.
type scrapeConfig struct {
	JobName        string           `json:"job_name"`
	HonorLabels    bool             `json:"honor_labels"`
	RelabelConfigs []relabel        `json:"relabel_configs"`
	Discovery      []map[string]any `json:"kubernetes_sd_configs"`
}

// relabel gives a target a label, or keeps it or not.
type relabel struct {
	Source        []string `json:"source_labels"`
	Target        string   `json:"target_label"`
	Regex, Action string
}

// scrapes returns the jobs of scrape.yaml.
func scrapes(t *testing.T) []scrapeConfig {
	t.Helper()
	var file struct {
		ScrapeConfigs []scrapeConfig `json:"scrape_configs"`
	}
	testkit.Check(t, yaml.UnmarshalStrict(monitoring(t, "scrape.yaml"), &file))
	return file.ScrapeConfigs
}

func jobs(t *testing.T) (all []string) {
	t.Helper()
	for _, c := range scrapes(t) {
		all = append(all, c.JobName)
	}
	return all
}

// targetLabels are those that the jobs of scrape.yaml give to all metrics.
func targetLabels(t *testing.T) []string {
	t.Helper()
	labels := map[string]bool{"job": true, "instance": true}
	for _, c := range scrapes(t) {
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
