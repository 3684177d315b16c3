package draw

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

// Prometheus is one that is asked by its HTTP API (https://prometheus.io/docs/prometheus/latest/querying/api/).
type Prometheus struct{ URL string }

// Series is a line of values.
type Series struct {
	Labels map[string]string
	Points []Point
}

// Point is a value at a time, in seconds since 1970.
type Point struct{ T, V float64 }

// UnmarshalJSON reads [seconds, "value"].
func (p *Point) UnmarshalJSON(text []byte) (err error) {
	var value string
	if err := json.Unmarshal(text, &[]any{&p.T, &value}); err != nil {
		return err
	}
	p.V, err = strconv.ParseFloat(value, 64)
	return err
}

// Get asks for a path.
func (p Prometheus) Get(ctx context.Context, path string, data any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, p.URL+path, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	answer := struct {
		Status, Error string
		Data          any
	}{Data: data}
	if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil {
		return err
	}
	if answer.Status != "success" {
		return fmt.Errorf("%s: %s", path, answer.Error)
	}
	return nil
}

// result is the answer to a query.
type result struct {
	Result []struct {
		Metric map[string]string
		Value  *Point
		Values []Point
	}
}

// series are those that have a value. No number is none: a rate of nothing divided by nothing, for instance.
func (r result) series() (all []Series) {
	for _, one := range r.Result {
		s := Series{Labels: one.Metric}
		if one.Value != nil {
			one.Values = append(one.Values, *one.Value)
		}
		for _, p := range one.Values {
			if !math.IsNaN(p.V) && !math.IsInf(p.V, 0) {
				s.Points = append(s.Points, p)
			}
		}
		if len(s.Points) > 0 {
			all = append(all, s)
		}
	}
	return all
}

// Query evaluates an expression now.
func (p Prometheus) Query(ctx context.Context, expr string) ([]Series, error) {
	var r result
	err := p.Get(ctx, "/api/v1/query?query="+url.QueryEscape(expr), &r)
	return r.series(), err
}

// QueryRange evaluates an expression all along a window.
func (p Prometheus) QueryRange(ctx context.Context, expr string, w Window) ([]Series, error) {
	at := func(t time.Time) string { return strconv.FormatFloat(float64(t.UnixMilli())/1000, 'f', 3, 64) }
	var r result
	err := p.Get(ctx, "/api/v1/query_range?"+url.Values{
		"query": {expr}, "start": {at(w.From)}, "end": {at(w.To)}, "step": {strconv.FormatFloat(w.Step.Seconds(), 'f', -1, 64)},
	}.Encode(), &r)
	return r.series(), err
}
