package coilctl

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"text/tabwriter"

	"golang.org/x/term"
	"sigs.k8s.io/yaml"
)

// Formats of output.
const (
	formatTable = "table"
	formatJSON  = "json"
	formatYAML  = "yaml"
)

var formats = []string{formatTable, formatJSON, formatYAML}

// When output has colours.
const (
	colourAuto   = "auto"
	colourAlways = "always"
	colourNever  = "never"
)

var colours = []string{colourAuto, colourAlways, colourNever}

func oneOf(s string, all []string) bool { return slices.Contains(all, s) }

// coloured says whether output has colours (https://no-color.org).
func (t *tool) coloured() bool {
	switch t.colour {
	case colourAlways:
		return true
	case colourNever:
		return false
	}
	f, ok := t.Out.(*os.File)
	return ok && term.IsTerminal(int(f.Fd())) && os.Getenv("NO_COLOR") == ""
}

// print writes a value as JSON or YAML or, as a table, the rows.
func (t *tool) print(value any, header []string, rows [][]string) error {
	switch t.format {
	case formatJSON:
		e := json.NewEncoder(t.Out)
		e.SetIndent("", "  ")
		return e.Encode(value)
	case formatYAML:
		text, err := yaml.Marshal(value)
		if err != nil {
			return err
		}
		_, err = t.Out.Write(text)
		return err
	}
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 3, ' ', 0)
	for _, row := range append([][]string{header}, rows...) {
		fmt.Fprintln(w, strings.Join(row, "\t"))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for line := range strings.Lines(b.String()) { // an empty cell at the end leaves blanks
		if _, err := fmt.Fprintln(t.Out, strings.TrimRight(line, " \n")); err != nil {
			return err
		}
	}
	return nil
}
