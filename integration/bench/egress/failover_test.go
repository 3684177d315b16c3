package main

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/integration/bench/figures"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// tries are flows that ended each a second after the other: passed (+), failed (- in silence, !), or not
// yet ended.
func tries(what string) []try {
	var all []try
	for i, c := range what {
		t := try{to: i % servers}
		if c != '.' {
			t.ended, t.passed, t.silent = time.Unix(int64(i), 0), c == '+', c == '-'
		}
		all = append(all, t)
	}
	return all
}

func TestFirstPassed(t *testing.T) {
	for what, want := range map[string]int64{"": -1, "...": -1, "--.": -1, "-.++": 2, "+": 0} {
		at, ok := firstPassed(tries(what))
		if ok != (want >= 0) || ok && at.Unix() != want {
			t.Errorf("of %q at %v, %t; want %d", what, at.Unix(), ok, want)
		}
	}
	// One that began later may have passed earlier.
	late := tries("-++")
	late[1].ended = time.Unix(9, 0)
	if at, _ := firstPassed(late); at.Unix() != 2 {
		t.Errorf("at %d, want that which passed first", at.Unix())
	}
}

func TestLastFailed(t *testing.T) {
	all := strings.Repeat("+", servers)
	for what, want := range map[string]int64{
		"":                   -1,
		all + all:            -1, // nothing has changed
		"-":                  -1,
		"-" + all[1:]:        -1, // not all addresses
		"-" + all:            servers,
		"--+-" + all + "..":  servers, // the first that had failed
		all + "-+" + all[1:]: 2 * servers,
		"--." + all:          -1, // it may fail yet
		"-" + all[1:] + ".+": -1,
		"-" + all + "-":      -1, // not yet over
	} {
		at, ok := lastFailed(tries(what))
		if ok != (want >= 0) || ok && at.Unix() != want {
			t.Errorf("of %q at %v, %t; want %d", what, at.Unix(), ok, want)
		}
	}
}

func TestCourse(t *testing.T) {
	if got := course(tries("+-.+!")); got != "+-?+!" {
		t.Errorf("it is told as %s", got)
	}
}

func TestPeerings(t *testing.T) {
	for _, c := range []struct {
		peerings []string
		want     string
		leases   bool
	}{
		{[]string{"Direct", "Service"}, "fixed IPv4 fixed IPv6 auto IPv4 auto IPv6 direct IPv4 direct IPv6", true},
		{[]string{"Service"}, "fixed IPv4 fixed IPv6 auto IPv4 auto IPv6", true},
		{[]string{"Direct"}, "direct IPv4 direct IPv6", false},
	} {
		f := failoverOf(c.peerings)
		var got []string
		for _, v := range f.variants {
			got = append(got, v.name, v.family.String())
		}
		if d := cmp.Diff(c.want, strings.Join(got, " ")); d != "" {
			t.Errorf("%v (-want +got):\n%s", c.peerings, d)
		}
		if f.has(v2.EgressPeeringService) != c.leases {
			t.Errorf("%v: rounds wait for Leases: %t", c.peerings, !c.leases)
		}
	}
}

func TestFailovers(t *testing.T) {
	off := time.Unix(100, 0)
	after := func(s float64) time.Time { return off.Add(time.Duration(s * float64(time.Second))) }
	r := Failovers{Variants: []Failover{{Family: "IPv4", Peering: "Service", SourcePort: "auto"}, {Family: "IPv6", Peering: "Direct", SourcePort: "fixed"}}}
	r.Variants[0].add(v2.EgressPeeringService, off, after(45), after(50))
	r.Variants[0].add(v2.EgressPeeringService, off, after(47), after(60))
	r.Variants[1].add(v2.EgressPeeringDirect, off, after(45), after(3))
	r.Variants[1].add(v2.EgressPeeringDirect, off, after(47), after(4.5))
	var out bytes.Buffer
	if err := r.print(&out); err != nil {
		t.Fatal(err)
	}
	want := `| | peering | source port | power-off to unlisted | unlisted to recovery | power-off to recovery |
|---|---|---|---|---|---|
| IPv4 | Service | auto | 46.0 s (45.0–47.0) | 9.0 s (5.0–13.0) | 55.0 s (50.0–60.0) |
| IPv6 | Direct | fixed | 46.0 s (45.0–47.0) | - | 3.8 s (3.0–4.5) |
`
	if d := cmp.Diff(want, out.String()); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	if got := r.figures(); len(got) != 3 || got[1].Value != 4.5 || got.Verdict() != nil {
		t.Errorf("figures %+v", got)
	}
	r.Variants[1].add(v2.EgressPeeringDirect, off, time.Time{}, after(5.2))
	if got := r.figures(); !errors.Is(got.Verdict(), figures.ErrMissed) {
		t.Errorf("too late, and the figures are %+v", got)
	}
	if n := len(r.Variants[1].Unlisted); n != 2 {
		t.Errorf("%d times of what nobody waited for", n-2)
	}
}
