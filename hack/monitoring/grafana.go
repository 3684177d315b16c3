package main

import (
	"cmp"
	"strings"
)

// dashboard is what one audience looks at.
type dashboard struct {
	// name is that of its file, and with "coil-" before it the UID by which links find it.
	name, title, description string
	variables                []variable
	rows                     []row
}

// variable is a choice at the top of the dashboard: values of a label, or all of them.
type variable struct {
	name string
	// series is a selector of PromQL, which has the label.
	series, label string
}

// row is a line of panels below a heading. They share the width.
type row struct {
	title  string
	panels []panel
}

// panel is a picture of queries.
type panel struct {
	title, description string
	// kind is that of Grafana; lines unless it is said.
	kind string
	// unit is one of Grafana's, such as percentunit, bytes, Bps, s and short.
	unit string
	// warn and alarm are where values turn orange and red; 0 is nowhere. With below, values turn red below alarm.
	warn, alarm float64
	below       bool
	stacked     bool
	queries     []query
}

// query is an expression of PromQL, and the name of each series, with labels in braces.
type query struct{ expr, legend string }

const (
	lines = "timeseries"
	bars  = "bargauge"
	stat  = "stat"

	height, width = 8, 24
)

type (
	object = map[string]any
	list   = []any
)

// source is the Prometheus that the user chooses.
var source = object{"type": "prometheus", "uid": "${datasource}"}

// grafana returns what is in a dashboard's file.
func (d dashboard) grafana() object {
	variables := list{object{
		"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus",
		"current": object{}, "hide": 0, "includeAll": false, "multi": false, "options": list{}, "refresh": 1, "regex": "", "skipUrlSync": false,
	}}
	for _, v := range d.variables {
		text := "label_values(" + v.series + ", " + v.label + ")"
		variables = append(variables, object{
			"name": v.name, "label": strings.ToUpper(v.name[:1]) + v.name[1:], "type": "query", "datasource": source,
			"definition": text, "query": object{"query": text, "refId": v.name, "qryType": 1},
			"current": object{"text": list{"All"}, "value": list{"$__all"}}, "allValue": ".*", "includeAll": true, "multi": true,
			"hide": 0, "options": list{}, "refresh": 2, "regex": "", "skipUrlSync": false, "sort": 1,
		})
	}
	panels, id, y := list{}, 0, 0
	for _, r := range d.rows {
		id++
		panels = append(panels, object{
			"id": id, "type": "row", "title": r.title, "collapsed": false, "panels": list{}, "gridPos": object{"h": 1, "w": width, "x": 0, "y": y},
		})
		y++
		w := width / len(r.panels)
		for i, p := range r.panels {
			id++
			panels = append(panels, p.grafana(id, object{"h": height, "w": w, "x": i * w, "y": y}))
		}
		y += height
	}
	return object{
		"uid": "coil-" + d.name, "title": d.title, "description": d.description, "tags": list{"coil"},
		"schemaVersion": 39, "version": 1, "id": nil, "editable": true, "fiscalYearStartMonth": 0, "graphTooltip": 1, "timezone": "",
		"refresh": "1m", "time": object{"from": "now-6h", "to": "now"}, "timepicker": object{}, "weekStart": "",
		"annotations": object{"list": list{}},
		"links": list{object{
			"type": "dashboards", "title": "Coil", "tags": list{"coil"}, "asDropdown": true, "includeVars": false, "keepTime": true,
			"targetBlank": false, "icon": "external link", "tooltip": "", "url": "",
		}},
		"templating": object{"list": variables}, "panels": panels,
	}
}

func (p panel) grafana(id int, pos object) object {
	kind := cmp.Or(p.kind, lines)
	targets := list{}
	for i, q := range p.queries {
		targets = append(targets, object{
			"refId": string(rune('A' + i)), "datasource": source, "editorMode": "code", "expr": q.expr, "legendFormat": q.legend,
			"range": kind != bars, "instant": kind == bars,
		})
	}
	defaults := object{
		"unit": p.unit, "min": 0, "color": object{"mode": "palette-classic"}, "mappings": list{},
		"thresholds": object{"mode": "absolute", "steps": p.steps()},
	}
	var options object
	switch kind {
	case lines:
		marks := "off"
		if p.warn != 0 || p.alarm != 0 {
			marks = "dashed"
		}
		stacking, fill := "none", 0
		if p.stacked {
			stacking, fill = "normal", 30
		}
		defaults["custom"] = object{
			"drawStyle": "line", "lineInterpolation": "linear", "lineWidth": 1, "fillOpacity": fill, "showPoints": "auto", "spanNulls": false,
			"stacking": object{"group": "A", "mode": stacking}, "thresholdsStyle": object{"mode": marks},
		}
		options = object{
			"legend":  object{"calcs": list{}, "displayMode": "list", "placement": "bottom", "showLegend": true},
			"tooltip": object{"mode": "multi", "sort": "desc"},
		}
	default:
		defaults["color"] = object{"mode": "thresholds"}
		options = object{"orientation": "auto", "reduceOptions": object{"calcs": list{"lastNotNull"}, "fields": "", "values": false}}
		if kind == bars {
			options["displayMode"], options["orientation"], options["showUnfilled"], options["valueMode"] = "basic", "horizontal", true, "color"
		} else {
			options["colorMode"], options["graphMode"], options["justifyMode"], options["textMode"] = "value", "area", "auto", "auto"
		}
		if p.unit == "percentunit" {
			defaults["max"] = 1
		}
	}
	return object{
		"id": id, "type": kind, "title": p.title, "description": p.description, "datasource": source, "gridPos": pos,
		"fieldConfig": object{"defaults": defaults, "overrides": list{}}, "options": options, "targets": targets,
	}
}

// steps are the colours of values.
func (p panel) steps() list {
	step := func(color string, from any) object { return object{"color": color, "value": from} }
	if p.below {
		return list{step("red", nil), step("green", p.alarm)}
	}
	steps := list{step("green", nil)}
	if p.warn != 0 {
		steps = append(steps, step("orange", p.warn))
	}
	if p.alarm != 0 {
		steps = append(steps, step("red", p.alarm))
	}
	return steps
}
