package main

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
)

// page returns the page about dashboards, with the pictures that there are in a folder.
func page(dir string) []byte {
	pictures, _ := filepath.Glob(filepath.Join(dir, "dashboards", "*.png")) // the pattern is well formed
	var b strings.Builder
	b.WriteString(`<!-- Written by "go run ./hack/monitoring". DO NOT EDIT. -->

# Dashboards

What each panel of the dashboards for Grafana shows. [How to install them](../README.md#monitoring), and [what alerts mean](RUNBOOK.md).
`)
	if len(pictures) > 0 {
		b.WriteString(`
The pictures are drawn from the dashboards' files, with metrics of real programs in a small network that a test makes: what Grafana draws differs in detail. Panels without data show what goes wrong, or
what takes days.
`)
	}
	for _, d := range dashboards {
		fmt.Fprintf(&b, "\n## %s\n\n%s\n", d.title, d.description)
		picture := filepath.Join("dashboards", d.name+".png")
		if slices.Contains(pictures, filepath.Join(dir, picture)) {
			fmt.Fprintf(&b, "\n![%s](%s)\n", d.title, picture)
		}
		for _, r := range d.rows {
			fmt.Fprintf(&b, "\n| %s | |\n|---|---|\n", r.title)
			for _, p := range r.panels {
				fmt.Fprintf(&b, "| %s | %s |\n", p.title, p.description)
			}
		}
	}
	return []byte(b.String())
}
