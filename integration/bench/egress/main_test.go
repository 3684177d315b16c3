package main

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestLowerBound(t *testing.T) {
	values := func(n int) []float64 {
		var vs []float64
		for i := range n {
			vs = append(vs, float64(i+1))
		}
		return vs
	}
	// The ranks of tables of the sign test, one-sided, 5 %.
	for n, want := range map[int]float64{5: 1, 8: 2, 10: 2, 20: 6, 30: 11, 100: 42} {
		if got := lowerBound(values(n)); got != want {
			t.Errorf("of %d values: the %gth, want the %gth", n, got, want)
		}
	}
	if lowerBound(nil) != 0 {
		t.Error("of none there is a bound")
	}
}

func TestMedian(t *testing.T) {
	for _, c := range []struct {
		values []float64
		want   float64
	}{{nil, 0}, {[]float64{3}, 3}, {[]float64{4, 1, 2}, 2}, {[]float64{4, 1, 2, 3}, 2.5}} {
		if got := median(c.values); got != c.want {
			t.Errorf("median of %v is %g", c.values, got)
		}
	}
}

func TestReportFigures(t *testing.T) {
	// By hand 100, by the Service a hundredth less, and so many directly and with floating addresses.
	report := func(direct, floating float64) Report {
		var r Report
		for _, clients := range []int{1, 1000} {
			p := Path{Family: "IPv4", Clients: clients}
			for range 8 {
				for via, v := range [paths]float64{viaHand: 100, viaService: 99, viaDirect: direct, viaFloating: floating, viaPlain: 100} {
					p.TCP.add(via, v)
					p.RTT.add(via, 1/v)
				}
			}
			r.Paths = append(r.Paths, p)
		}
		return r
	}
	for _, c := range []struct {
		direct, floating float64
		missed           []string
	}{
		{99, 97, nil},
		{90, 99, []string{
			"IPv4, 1 clients, TCP, Direct to Service, lower 95 % bound of the median",
			"IPv4, 1 clients, round trip, Direct to Service, median",
		}},
		{99, 95, []string{
			"IPv4, 1 clients, TCP, floating addresses to Service, median",
			"IPv4, 1 clients, round trip, Service to floating addresses, median",
		}},
	} {
		var missed []string
		for _, f := range report(c.direct, c.floating).figures() {
			if !f.Reached {
				missed = append(missed, f.Name)
			}
		}
		if d := cmp.Diff(c.missed, missed); d != "" {
			t.Errorf("Direct at %g, floating addresses at %g: missed (-want +got):\n%s", c.direct, c.floating, d)
		}
	}
}
