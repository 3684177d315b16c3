package coilctl

import (
	"encoding/json"
	"io"
	"os"
	"slices"
	"strings"
	"unicode/utf8"

	"golang.org/x/term"
	"sigs.k8s.io/yaml"
)

// Formats of output.
const (
	formatTable = "table"
	formatJSON  = "json"
	formatYAML  = "yaml"
	// formatWide is a table with all columns. Commands see formatTable.
	formatWide = "wide"
)

var formats = []string{formatTable, formatJSON, formatYAML, formatWide}

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
	text, _ := aligned(append([][]string{header}, rows...), nil)
	_, err := io.WriteString(t.Out, text)
	return err
}

// gap is between columns.
const gap = 3

// aligned is the text of rows, which it makes printable. Columns have at least these widths, and the result is what they have now.
func aligned(rows [][]string, widths []int) (string, []int) {
	for _, r := range rows {
		for i, c := range r {
			c = printable(c)
			r[i] = c
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], utf8.RuneCountInString(c))
		}
	}
	var b strings.Builder
	for _, r := range rows {
		var line strings.Builder
		for i, c := range r {
			line.WriteString(c + strings.Repeat(" ", widths[i]-utf8.RuneCountInString(c)+gap))
		}
		b.WriteString(strings.TrimRight(line.String(), " ") + "\n")
	}
	return b.String(), widths
}
