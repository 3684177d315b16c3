package coild

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/coil-net/coil/pkg/attachment"
)

// The admin is told what to do about each kind of what is destroyed again and again. All kinds are counted, whatever is
// switched on.
func TestAdviceForEachKind(t *testing.T) {
	for _, c := range []struct {
		o     Options
		parts int
	}{{Options{}, 1}, {Options{IPAM: true}, 3}, {Options{Egress: true}, 2}, {Options{IPAM: true, Egress: true}, 6}, {Options{Egress: true, Floating: true}, 5}} {
		d := &daemon{Options: c.o}
		d.makeParts()
		if len(d.kinds) != 17 || len(d.parts) != c.parts {
			t.Errorf("IPAM %t, egress %t: %d kinds and %d parts, want 17 and %d", c.o.IPAM, c.o.Egress, len(d.kinds), len(d.parts), c.parts)
		}
		for k, advice := range d.kinds {
			if advice == "" {
				t.Errorf("none for %s", k)
			}
		}
	}
}

// A DEL goes to the parts in their order, up to one that fails: it is repeated then.
func TestDel(t *testing.T) {
	failure := errors.New("no memory")
	for _, c := range []struct {
		fails int
		want  string
		err   error
	}{{-1, "[0 c1] [2 c1]", nil}, {0, "[0 c1]", failure}, {2, "[0 c1] [2 c1]", failure}} {
		var told []string
		d := &daemon{parts: make([]part, 3)}
		for _, i := range []int{0, 2} {
			d.parts[i].forget = func(_ context.Context, id attachment.ID) error {
				told = append(told, fmt.Sprint([]any{i, id.ContainerID}))
				if i == c.fails {
					return failure
				}
				return nil
			}
		}
		err := d.Del(t.Context(), attachment.ID{ContainerID: "c1", IfName: "eth0"})
		if got := strings.Join(told, " "); got != c.want || !errors.Is(err, c.err) {
			t.Errorf("part %d fails: told %s, %v; want %s", c.fails, got, err, c.want)
		}
	}
}
