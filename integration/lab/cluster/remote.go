package cluster

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strconv"

	"github.com/coil-net/coil/integration/lab/machine"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// Remote is a control plane outside of the cluster's machines: the host's, for nodes that are in a
// virtual machine, where kube-apiserver takes minutes to start.
type Remote struct {
	Dir  string         // with the CA, as that of controlplane.API
	Addr netip.AddrPort // of the API server, whose certificate names it
	// Link of this machine leads there. The fabric takes it, has the address Local on it, and
	// translates what nodes and pods send by it.
	Link  string
	Local netip.Prefix
}

func (r *Remote) validate() error {
	if r == nil {
		return nil
	}
	var errs []error
	if r.Dir == "" || r.Link == "" {
		errs = append(errs, errors.New("a control plane elsewhere needs its directory and a link"))
	}
	if !r.Addr.IsValid() || !r.Local.IsValid() || r.Addr.Addr().Is4() != r.Local.Addr().Is4() {
		errs = append(errs, fmt.Errorf("the control plane at %s can't be reached from %s", r.Addr, r.Local))
	}
	return errors.Join(errs...)
}

// takeLink moves the link to a control plane elsewhere into the fabric's network namespace, which is
// then the way to there.
func (r *Remote) takeLink(ctx context.Context, fabric machine.Init) error {
	if _, err := netlab.Machine().Run(ctx, "ip", "link", "set", r.Link, "netns", strconv.Itoa(fabric.PID)); err != nil {
		return fmt.Errorf("move %s into the fabric: %w", r.Link, err)
	}
	if err := ip(ctx, fabric, "link set "+r.Link+" up", "addr add "+r.Local.String()+" dev "+r.Link); err != nil {
		return err
	}
	rule := fmt.Sprintf("add table inet lab; add chain inet lab out { type nat hook postrouting priority srcnat; oifname %q masquerade; }", r.Link)
	err := inNetns(fabric, func(ns *netlab.NS) error {
		if err := ns.Forward(); err != nil {
			return err
		}
		_, err := ns.Run(ctx, "nft", rule)
		return err
	})
	if err != nil {
		return fmt.Errorf("let nodes out by %s: %w", r.Link, err)
	}
	return nil
}
