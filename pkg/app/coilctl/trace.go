package coilctl

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/coil-net/coil/pkg/plan/diagnosis"
)

// errLost says that packets get lost, which was printed.
var errLost = errors.New("packets get lost")

// trace returns the command that follows packets of a pod.
func (t *tool) trace() *cobra.Command {
	o := &whyOptions{tool: t}
	c := &cobra.Command{
		Use: "trace [NAMESPACE/]POD DESTINATION[:PORT]", Short: "Tell which way packets of a pod go to an address", Args: exactly(2),
		Long: "Tell which way packets of a pod go to an address: the rule, the table and the link in the pod and on its node, the tunnel to a router of an Egress, and the source address that " +
			"the destination sees. Kernels are asked what they would do; nothing is sent. What rules of nftables and Service proxies do with packets isn't told.\n\n" +
			"It needs the rights to get pods and namespaces, to list pods, and to list egresses, egresspolicies and egressclusterpolicies of coil.cybozu.com; also to get and create pods/exec in the " +
			"namespaces of coild and of the Egresses. The exit code is 1 if packets get lost.",
		Example: "  coilctl trace shop/cart-0 203.0.113.5\n  coilctl trace cart-0 '[2001:db8::5]:443' --namespace=shop -o json",
		RunE: func(c *cobra.Command, args []string) error {
			namespace, name, err := o.nameOf("pod", args[0])
			if err != nil {
				return err
			}
			to, err := destination(args[1])
			if err != nil {
				return err
			}
			return o.follow(c.Context(), namespace, name, to)
		},
	}
	c.Flags().DurationVar(&o.timeout, "timeout", 10*time.Second, "the longest time for all that is read and asked")
	return c
}

// destination reads an address, with a port or without.
func destination(text string) (netip.AddrPort, error) {
	if a, err := netip.ParseAddr(strings.Trim(text, "[]")); err == nil {
		return netip.AddrPortFrom(a.Unmap().WithZone(""), 0), nil
	}
	to, err := netip.ParseAddrPort(text)
	if err != nil {
		return to, fmt.Errorf("%q isn't an address, or ADDRESS:PORT", text)
	}
	return netip.AddrPortFrom(to.Addr().Unmap().WithZone(""), to.Port()), nil
}

// follow prints the way of a pod's packets.
func (o *whyOptions) follow(ctx context.Context, namespace, name string, to netip.AddrPort) error {
	e, err := o.examiner()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	p, err := e.Trace(ctx, namespace, name, to)
	if err != nil {
		return err
	}
	if err := o.showPath(p); err != nil {
		return err
	}
	if p.Lost != "" {
		return errLost
	}
	return nil
}

// showPath prints a path as a table of hops.
func (o *whyOptions) showPath(p diagnosis.Path) error {
	var rows [][]string
	for i, h := range p.Hops {
		rule, _, _ := strings.Cut(h.Rule, ":")
		table := ""
		if h.Table != 0 {
			table = strconv.Itoa(h.Table)
		}
		by := strings.Join(h.Links, ",")
		if h.Gateway != "" {
			by += " via " + h.Gateway
		}
		if by == "" {
			by = h.Route
		}
		note := h.Note
		if h.Dropped != "" {
			note = "LOST: " + h.Dropped
		}
		rows = append(rows, []string{strconv.Itoa(i + 1), h.Where, h.From, h.To, rule, table, by, note})
	}
	if o.format != formatTable {
		return o.print(p, nil, nil)
	}
	fmt.Fprintln(o.Out, p.Subject)
	if len(rows) > 0 {
		if err := o.print(p, []string{"HOP", "WHERE", "FROM", "TO", "RULE", "TABLE", "BY", "NOTE"}, rows); err != nil {
			return err
		}
	}
	for _, text := range p.Unknown {
		fmt.Fprintln(o.Out, "?", text)
	}
	if p.Lost == "" && len(p.Sources) > 0 {
		fmt.Fprintln(o.Out, "The destination sees", strings.Join(p.Sources, " or "))
	}
	return nil
}
