package draw

import (
	"bytes"
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"html/template"
)

//go:embed page.html
var pageText string

var page = template.Must(template.New("page").Parse(pageText))

// Sizes in pixels. Grafana's pages have 24 columns, and rows of a fixed height.
const (
	column, row, gap = 45, 20, 6
	// around is what a panel has besides its image at both sides, and above and below: its title and the legend.
	beside, above = 2 * 8, 64
	// Width is that of the page.
	Width = 24*column + 25*gap
)

// Drawn is the page of a dashboard.
type Drawn struct {
	HTML []byte
	// Height is that of the page in pixels.
	Height int
	// Empty are the titles of panels without data.
	Empty []string
}

// view is a panel as the page has it.
type view struct {
	Kind, Title, Description   string
	Column, Columns, Row, Rows int
	Empty                      bool
	Chart                      *chart
	Numbers                    []number
}

// number is a value with its name, its colour, and how much of the largest it is.
type number struct {
	Name, Text, Colour string
	Percent            float64
}

// Draw asks for the values of all panels. It is an error if a query fails, or something of the dashboard isn't known.
func (d Dashboard) Draw(ctx context.Context, p Prometheus, w Window) (Drawn, error) {
	var drawn Drawn
	var errs []error
	var views []view
	rows := 0
	for _, panel := range d.Panels {
		v, err := panel.view(ctx, p, w)
		if err != nil {
			errs = append(errs, fmt.Errorf("panel %q: %w", panel.Title, err))
		}
		if v.Empty {
			drawn.Empty = append(drawn.Empty, v.Title)
		}
		rows = max(rows, panel.GridPos.Y+panel.GridPos.H)
		views = append(views, v)
	}
	if err := errors.Join(errs...); err != nil {
		return Drawn{}, err
	}
	const header = 60
	drawn.Height = header + rows*(row+gap) + 2*gap
	var b bytes.Buffer
	err := page.Execute(&b, map[string]any{
		"Title": d.Title, "Description": d.Description, "Variables": d.Templating.List, "Panels": views,
		"From": w.From.UTC().Format("2006-01-02 15:04:05"), "To": w.To.UTC().Format("15:04:05"),
		"ColumnPixels": column, "RowPixels": row, "Gap": gap, "Header": header,
	})
	drawn.HTML = b.Bytes()
	return drawn, err
}

// view asks for the values of a panel.
func (p Panel) view(ctx context.Context, from Prometheus, w Window) (view, error) {
	g := p.GridPos
	v := view{Kind: p.Type, Title: p.Title, Description: p.Description, Column: g.X + 1, Columns: g.W, Row: g.Y + 1, Rows: g.H}
	if p.Type == kindRow {
		return v, nil
	}
	var all []named
	for _, t := range p.Targets {
		ask := func() ([]Series, error) { return from.QueryRange(ctx, w.All(t.Expr), w) }
		if p.Type == kindBars {
			ask = func() ([]Series, error) { return from.Query(ctx, w.All(t.Expr)) }
		}
		series, err := ask()
		if err != nil {
			return v, err
		}
		for _, s := range series {
			all = append(all, named{t.legend(s), s.Points})
		}
	}
	v.Empty = len(all) == 0
	return v, v.fill(p, w, all)
}

// fill puts values into the panel.
func (v *view) fill(p Panel, w Window, all []named) (err error) {
	d := p.FieldConfig.Defaults
	width, height := v.Columns*(column+gap)-gap-beside, v.Rows*(row+gap)-gap-above
	switch p.Type {
	case kindLines:
		v.Chart, err = newChart(width, height, w, d, all)
		return err
	case kindStat:
		if v.Numbers, err = numbers(d, all); err != nil {
			return err
		}
		d.Custom.FillOpacity = 30 // Grafana's graph of an area, which has neither ticks nor names
		if v.Chart, err = newChart(width, height/2, w, d, all); err == nil {
			for i := range v.Chart.Lines {
				v.Chart.Lines[i].Colour = v.Numbers[i].Colour
			}
		}
		return err
	case kindBars:
		v.Numbers, err = numbers(d, all)
		return err
	}
	return fmt.Errorf("the kind %q isn't known", p.Type)
}

// numbers are the last values.
func numbers(d Defaults, all []named) (numbers []number, err error) {
	u, ok := units[d.Unit]
	if !ok {
		return nil, fmt.Errorf("the unit %q isn't known", d.Unit)
	}
	last := func(s named) float64 { return s.points[len(s.points)-1].V }
	largest := 0.0
	for _, s := range all {
		largest = max(largest, last(s))
	}
	if d.Max != nil {
		largest = *d.Max
	}
	for _, s := range all {
		n := number{Name: s.name, Text: u.write(last(s))}
		if n.Colour, err = d.colour(last(s)); err != nil {
			return nil, err
		}
		n.Percent = round(100 * min(max(last(s)/cmp.Or(largest, 1), 0), 1))
		numbers = append(numbers, n)
	}
	return numbers, nil
}
