package tunnel

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

func spec(local, remote string) dataplane.Tunnel {
	return dataplane.Tunnel{Local: netip.MustParseAddr(local), Remote: netip.MustParseAddr(remote), SourcePort: 5555, Port: 5555, MTU: 1472}
}

func found(name string, index int, s dataplane.Tunnel) rtnl.Tunnel {
	return rtnl.Tunnel{
		Link: rtnl.Link{Index: index, Name: name, Up: true, Parameters: rtnl.Parameters{HasIPv6: true, NoAutoAddress: true}},
		Spec: s, Exact: true,
	}
}

func TestCompare(t *testing.T) {
	want := spec("10.0.0.1", "10.0.0.2")
	name := dataplane.TunnelName(want.Remote, 0)
	auto := want
	auto.SourcePort = 0
	inexact := found(name, 7, want)
	inexact.Exact = false
	down := found(name, 7, want)
	down.Up = false
	noisy := found(name, 7, want)
	noisy.NoAutoAddress = false
	owned := want
	owned.Alias = "a"
	labelled := found(name, 7, want)
	labelled.Alias = "a"
	receiver := found("coil_ipip4", 7, dataplane.Tunnel{})
	receiver.Receiver = true
	six := spec("fd00::1", "fd00::2")
	first, second := dataplane.TunnelName(six.Remote, 0), dataplane.TunnelName(six.Remote, 1)
	for _, c := range []struct {
		name string
		want dataplane.Tunnel
		have []rtnl.Tunnel
		step *step // nil: an error
	}{
		{"nothing there", want, nil, &step{want, name, 0, false, true, true, false}},
		{"receiver", want, []rtnl.Tunnel{receiver}, &step{want, name, 0, false, true, true, false}},
		{"as wanted", want, []rtnl.Tunnel{found(name, 7, want)}, &step{want, name, 7, false, false, false, false}},
		{"other source port", auto, []rtnl.Tunnel{found(name, 7, want)}, &step{auto, name, 7, true, false, false, false}},
		{"another way of FoU", want, []rtnl.Tunnel{inexact}, &step{want, name, 7, true, false, false, false}},
		{"down", want, []rtnl.Tunnel{down}, &step{want, name, 7, false, false, true, false}},
		{"makes addresses", want, []rtnl.Tunnel{noisy}, &step{want, name, 7, false, true, false, false}},
		{"from another address", want, []rtnl.Tunnel{found(name, 7, spec("10.0.0.9", "10.0.0.2"))}, &step{want, name, 7, true, true, true, false}},
		{"another's under the name", want, []rtnl.Tunnel{found(name, 7, spec("10.0.0.1", "10.0.0.9"))}, nil},
		{"another's with the addresses", want, []rtnl.Tunnel{found("other", 7, want)}, nil},
		{"new with an alias", owned, nil, &step{owned, name, 0, false, true, true, true}},
		{"without its alias", owned, []rtnl.Tunnel{found(name, 7, want)}, &step{owned, name, 7, false, false, false, true}},
		{"with its alias", owned, []rtnl.Tunnel{labelled}, &step{owned, name, 7, false, false, false, false}},
		{"with an alias, whatever it is", want, []rtnl.Tunnel{labelled}, &step{want, name, 7, false, false, false, false}},
		{"IPv6", six, nil, &step{six, first, 0, false, true, true, false}},
		{"IPv6, name of another address", six, []rtnl.Tunnel{found(first, 7, spec("fd00::1", "fd00::9"))}, &step{six, second, 0, false, true, true, false}},
		{"IPv6, under its second name", six, []rtnl.Tunnel{found(second, 7, six)}, &step{six, second, 7, false, false, false, false}},
		{"IPv6, second name, from another address", six, []rtnl.Tunnel{
			found(first, 6, spec("fd00::1", "fd00::9")), found(second, 7, spec("fd00::f", "fd00::2")),
		}, &step{six, second, 7, true, true, true, false}},
	} {
		t.Run(c.name, func(t *testing.T) {
			steps, errs := compare(dataplane.FamilyOf(c.want.Remote), []dataplane.Tunnel{c.want}, c.have)
			var want []step
			if c.step != nil {
				want = append(want, *c.step)
			}
			if d := cmp.Diff(want, steps, cmp.AllowUnexported(step{}), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); d != "" {
				t.Errorf("-want +got:\n%s", d)
			}
			if err := errors.Join(errs...); (c.step == nil) != errors.Is(err, rtnl.ErrExist) {
				t.Errorf("error is %v", err)
			}
		})
	}
}

func TestCheck(t *testing.T) {
	good := spec("10.0.0.1", "10.0.0.2")
	for name, bad := range map[string]dataplane.Tunnel{
		"two families": spec("fd00::1", "10.0.0.3"),
		"twice":        spec("10.0.0.9", "10.0.0.2"),
	} {
		wanted, err := check(dataplane.IPv4, []dataplane.Tunnel{good, bad, spec("fd00::1", "fd00::2")})
		if err == nil || len(wanted) != 1 || wanted[0] != good {
			t.Errorf("%s: %v, %v", name, wanted, err)
		}
	}
}

// A tunnel that isn't as it should be has a problem in words.
func TestProblem(t *testing.T) {
	want := spec("10.0.0.1", "10.0.0.2")
	name := dataplane.TunnelName(want.Remote, 0)
	other, down := found(name, 7, want), found(name, 7, want)
	other.Spec.MTU, down.Up = 1400, false
	for says, have := range map[string][]rtnl.Tunnel{"": {found(name, 7, want)}, "is missing": nil, "is changed": {other}, "is down": {down}} {
		steps, errs := compare(dataplane.IPv4, []dataplane.Tunnel{want}, have)
		if len(steps) != 1 || len(errs) > 0 {
			t.Fatalf("%q: %+v, %v", says, steps, errs)
		}
		if err := steps[0].problem(have); (err == nil) != (says == "") || err != nil && !strings.Contains(err.Error(), says) {
			t.Errorf("%v, want %q", err, says)
		}
	}
}
