package podnet

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/kernel/sysctl"
	"github.com/coil-net/coil/pkg/plan/inspection"
)

// Look compares everything of a pod with what Attach made and repairs restore, for people. Nothing is changed.
func (n *Network) Look(ctx context.Context, p Pod, a Attachment) []inspection.Comparison {
	host, err := n.compareHost(ctx, p, a)
	if err != nil {
		host.fail(inspection.Veth, "link "+a.HostIfName, fmt.Sprintf("index %d", a.HostIfIndex), err)
	}
	inside, err := n.comparePod(ctx, p, a)
	if err != nil {
		inside.fail(inspection.Inside, fmt.Sprintf("link %s in %s", p.IfName, p.Netns), "the other end of "+a.HostIfName, err)
	}
	var all []inspection.Comparison
	for _, c := range slices.Concat(host, inside) {
		all = append(all, c.Comparison)
	}
	all = append(all, n.lookAtRoutes(ctx, p, a)...)
	all = append(all, n.lookAtParameters(ctx, p, a)...)
	if n.opts.SourceGuard {
		all = append(all, n.lookAtGroup(ctx, p, a)...)
	}
	return all
}

// lookAtRoutes looks for the routes to a pod in the pod table.
func (n *Network) lookAtRoutes(ctx context.Context, p Pod, a Attachment) (all []inspection.Comparison) {
	want, err := n.wantedRoutes(ctx, []Wired{{Pod: p, HostIfIndex: a.HostIfIndex}}, map[netip.Addr]bool{})
	missing := want
	if err == nil {
		missing, err = n.routes.Missing(ctx, want)
	}
	if err != nil {
		return []inspection.Comparison{unknown(inspection.Routes, "routes to "+p.Address.String(), err)}
	}
	for _, r := range want {
		all = append(all, present(inspection.Routes, "route to "+r.Dst.Addr().String(), r, missing))
	}
	return all
}

// lookAtParameters looks at the kernel parameters of the host's end of a pod's link. A link that is gone has none.
func (n *Network) lookAtParameters(ctx context.Context, p Pod, a Attachment) (all []inspection.Comparison) {
	l, err := n.handle.LinkByIndex(ctx, a.HostIfIndex)
	if errors.Is(err, rtnl.ErrNotExist) {
		return nil
	}
	if err != nil {
		return []inspection.Comparison{unknown(inspection.Sysctls, "kernel parameters of "+a.HostIfName, err)}
	}
	var change rtnl.LinkChange
	p.learn(l)
	n.mendParameters(&change, p, l, a.PodMAC != "")
	see := func(family, parameter string, have, want any, wrong bool) {
		all = append(all, comparison(inspection.Sysctls, "net."+family+".conf."+l.Name+"."+parameter, fmt.Sprint(want), fmt.Sprint(have), !wrong))
	}
	see("ipv4", "forwarding", number(l.Forwarding), 1, change.Forwarding)
	see("ipv4", "rp_filter", l.RPFilter, rtnl.LooseRPFilter, change.RPFilter != 0)
	see("ipv4", "arp_filter", number(l.ARPFilter), number(n.opts.guards(p)), change.ARPFilter != nil)
	if !l.HasIPv6 {
		return all
	}
	restored := map[string]string{}
	for _, s := range sysctlsOf(Wired{Pod: p}, l) {
		restored[s.Key] = s.Value
	}
	for _, s := range []struct {
		parameter string
		have      int
	}{{"accept_ra", l.AcceptRA}, {"forwarding", number(l.ForwardingIPv6)}, {"disable_ipv6", number(l.DisableIPv6)}} {
		want, wrong := restored[ipv6Setting(l.Name, s.parameter, "").Key]
		if !wrong {
			want = fmt.Sprint(s.have)
		}
		see("ipv6", s.parameter, s.have, want, wrong)
	}
	see("ipv6", "addr_gen_mode none", l.NoAutoAddress, l.NoAutoAddress || change.NoAutoAddress, change.NoAutoAddress)
	return all
}

// lookAtGroup looks whether the pod's link has the group that the source guard wants.
func (n *Network) lookAtGroup(ctx context.Context, p Pod, a Attachment) []inspection.Comparison {
	l, err := n.handle.LinkByIndex(ctx, a.HostIfIndex)
	if errors.Is(err, rtnl.ErrNotExist) {
		return nil
	}
	if err != nil {
		return []inspection.Comparison{unknown(inspection.Guard, "group of "+a.HostIfName, err)}
	}
	p.learn(l)
	return []inspection.Comparison{comparison(inspection.Guard, "group of "+l.Name, fmt.Sprintf("%#x", p.group()), fmt.Sprintf("%#x", l.Group), l.Group == p.group())}
}

// LookAtHost compares what pods share with what it should be, for people. Nothing is changed.
func (n *Network) LookAtHost(ctx context.Context) (all []inspection.Comparison) {
	want := n.wantedRules()
	missing, err := n.rules.Missing(ctx, want)
	if err != nil {
		all = append(all, unknown(inspection.Rules, "rules", err))
	} else {
		for _, r := range want {
			all = append(all, present(inspection.Rules, fmt.Sprintf("rule %d (%s)", r.Priority, r.Family), r, missing))
		}
	}
	settings := []sysctl.Setting{forwardIPv4}
	if n.ipv6 {
		settings = append(settings, forwardIPv6...)
	}
	for _, s := range settings {
		have, err := sysctl.Get(n.host, s.Key)
		if err != nil {
			all = append(all, unknown(inspection.Sysctls, s.Key, err))
			continue
		}
		all = append(all, comparison(inspection.Sysctls, s.Key, s.Value, have, have == s.Value))
	}
	return append(all, n.lookAtGuard(ctx)...)
}

// lookAtGuard compares the host's table.
func (n *Network) lookAtGuard(ctx context.Context) []inspection.Comparison {
	err := n.checkTable(ctx)
	table := inspection.Comparison{Topic: inspection.Guard, Object: "table inet " + dataplane.NftTable, Want: "as coild makes it", Have: "as coild makes it", OK: err == nil}
	if err != nil {
		table.Have = err.Error()
	}
	return []inspection.Comparison{table}
}

func number(b bool) int {
	if b {
		return 1
	}
	return 0
}

// unknown is an object that can't be read.
func unknown(topic inspection.Topic, object string, err error) inspection.Comparison {
	return inspection.Comparison{Topic: topic, Object: object, Unknown: err.Error()}
}

// present is an object that is there unless it is among the missing ones.
func present[T interface {
	comparable
	fmt.Stringer
}](topic inspection.Topic, object string, want T, missing []T) inspection.Comparison {
	if slices.Contains(missing, want) {
		return comparison(topic, object, want.String(), "", false)
	}
	return comparison(topic, object, want.String(), want.String(), true)
}
