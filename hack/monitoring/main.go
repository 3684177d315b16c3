// Command monitoring writes the dashboards of manifests/monitoring for Grafana, one for each audience. Run it in the root of the repository
// after a change.
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
)

const folder = "manifests/monitoring"

func main() {
	files, err := written()
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

// written returns the files, by their names.
func written() (map[string][]byte, error) {
	files := map[string][]byte{}
	for _, d := range dashboards {
		out, err := json.MarshalIndent(d.grafana(), "", "  ")
		if err != nil {
			return nil, err
		}
		files["dashboards/"+d.name+".json"] = append(out, '\n')
	}
	return files, nil
}
