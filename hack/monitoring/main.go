// Command monitoring writes those files of manifests/monitoring that say what others say, too: dashboards for Grafana, one for each audience,
// the page about them, and the alerts of rules.yaml as the operator of Prometheus reads them. Run it in the root of the repository after a change.
//
// The panels of dashboards are values of this package: a title, what it shows, a unit and queries of PromQL. It must not know which metrics
// there are: integration/monitoring checks the queries.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

const folder = "manifests/monitoring"

func main() {
	files, err := written(folder)
	for name, content := range files {
		err = errors.Join(err, os.WriteFile(filepath.Join(folder, name), content, 0o644))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// dashboards are for those who have addresses, nodes, ways out and ways in to look after.
var dashboards = []dashboard{addresses, node, egress, services}

// written returns the files, by their names in a folder that has the alerts.
func written(dir string) (map[string][]byte, error) {
	files := map[string][]byte{}
	for _, d := range dashboards {
		out, err := json.MarshalIndent(d.grafana(), "", "  ")
		if err != nil {
			return nil, err
		}
		files["dashboards/"+d.name+".json"] = append(out, '\n')
	}
	files["DASHBOARDS.md"] = page(dir)
	rules, err := os.ReadFile(filepath.Join(dir, "rules.yaml"))
	if err != nil {
		return nil, err
	}
	files["operator/rules.yaml"] = []byte(operatorRules(string(rules)))
	return files, nil
}

// operatorRules returns a PrometheusRule with the groups of a file of rules.
func operatorRules(rules string) string {
	var b strings.Builder
	b.WriteString(`# Written by "go run ./hack/monitoring" from ../rules.yaml. DO NOT EDIT.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: coil
  namespace: kube-system
  labels:
    app.kubernetes.io/name: coil
spec:
`)
	_, groups, _ := strings.Cut(rules, "\ngroups:\n")
	for line := range strings.Lines("groups:\n" + groups) {
		b.WriteString("  " + line)
	}
	return b.String()
}
