package rule_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/dataplane"
)

func TestRemove(t *testing.T) {
	s := newSpace(t)
	for _, args := range [][]string{
		{"priority", "2000", "lookup", "98", "protocol", "77"},
		{"priority", "2001", "to", "10.0.0.0/8", "lookup", "99", "protocol", "static"},
		{"priority", "1999", "lookup", "116", "protocol", "30"},
	} {
		s.IP(t, append([]string{"rule", "add"}, args...)...)
	}
	s.addWithoutProtocol(t, dataplane.Rule{Family: dataplane.IPv4, Priority: 2000, Table: 97})
	before := s.show(t)
	for _, earlierFirst := range []bool{true, false} {
		if earlierFirst {
			s.addWithoutProtocol(t, want[0])
			s.addWithoutProtocol(t, want[1])
		}
		s.IP(t, "rule", "add", "priority", "2000", "lookup", "116", "protocol", "30")
		s.IP(t, "-6", "rule", "add", "priority", "2000", "lookup", "116", "protocol", "30")
		// With other numbers than now, too.
		s.IP(t, "rule", "add", "priority", "2001", "lookup", "200", "protocol", "30")
		if !earlierFirst {
			s.addWithoutProtocol(t, want[0])
			s.addWithoutProtocol(t, want[1])
		}
		removed, err := s.Remove(t.Context(), want)
		if err != nil || len(removed) != 5 {
			t.Errorf("removed %v, %v", removed, err)
		}
		if diff := cmp.Diff(before, s.show(t)); diff != "" {
			t.Errorf("rules (-before +after):\n%s", diff)
		}
		if removed, err := s.Remove(t.Context(), want); err != nil || len(removed) > 0 {
			t.Errorf("again: %v, %v", removed, err)
		}
	}
}

// The kernel takes the first match for a rule without a protocol: another program's must stay.
func TestRemoveBehindAnother(t *testing.T) {
	s := newSpace(t)
	s.IP(t, "rule", "add", "priority", "2000", "fwmark", "1", "lookup", "116", "protocol", "77")
	s.addWithoutProtocol(t, want[0])
	before := s.show(t)
	if removed, err := s.Remove(t.Context(), want); err == nil || !strings.Contains(err.Error(), "proto 77") || len(removed) > 0 {
		t.Errorf("removed %v, %v", removed, err)
	}
	if diff := cmp.Diff(before, s.show(t)); diff != "" {
		t.Errorf("rules (-before +after):\n%s", diff)
	}
}
