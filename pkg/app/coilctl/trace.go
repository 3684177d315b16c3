package coilctl

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/diagnosis"
	"github.com/coil-net/coil/pkg/plan/inspection"
)

var (
	// errLost says that packets get lost, which was printed.
	errLost = errors.New("packets get lost")
	// errUnanswered says that packets that were sent weren't answered, which was printed.
	errUnanswered = errors.New("the destination hasn't answered all packets")
)

// traceOptions are the flags of trace.
type traceOptions struct {
	*whyOptions
	send     bool
	protocol string
	count    int
}

// trace returns the command that follows packets of a pod.
func (t *tool) trace() *cobra.Command {
	o := &traceOptions{whyOptions: &whyOptions{tool: t}}
	c := &cobra.Command{
		Use: "trace [NAMESPACE/]POD DESTINATION[:PORT]", Short: "Tell which way packets of a pod go to an address", Args: exactly(2),
		Long: "Tell which way packets of a pod go to an address: the rule, the table and the link in the pod and on its node, the tunnel to a router of an Egress, and the source address that " +
			"the destination sees. Kernels are asked what they would do. What rules of nftables and Service proxies do with packets isn't told.\n\n" +
			"Without --send nothing is sent. With it coild sends a few packets from the network namespace of the pod: echo requests of ICMP or, if the destination has a port, SYN of TCP or datagrams of UDP. They are " +
			"counted at each hop. The answers are printed, and how far packets without an answer came. The destination sees them as those of the pod.\n\n" +
			"It needs the rights to get pods and namespaces, to list pods, and to list egresses, egresspolicies and egressclusterpolicies of coil.cybozu.com; also to get and create pods/exec in the " +
			"namespaces of coild and of the Egresses. The exit code is 1 if packets get lost; with --send, if one of them isn't answered by the destination.",
		Example: "  coilctl trace shop/cart-0 203.0.113.5\n  coilctl trace cart-0 '[2001:db8::5]:443' --namespace=shop -o json\n  coilctl trace shop/cart-0 203.0.113.5:53 --send --protocol=udp",
		RunE: func(c *cobra.Command, args []string) error {
			namespace, name, err := o.nameOf("pod", args[0])
			if err != nil {
				return err
			}
			to, err := destination(args[1])
			if err != nil {
				return err
			}
			order, err := o.order(c, to)
			if err != nil {
				return err
			}
			return o.follow(c.Context(), namespace, name, order)
		},
	}
	c.Flags().DurationVar(&o.timeout, "timeout", 10*time.Second, "the longest time for all that is read and asked; with --send there are 12s more")
	c.Flags().BoolVar(&o.send, "send", false, "send packets from the pod, and count them at each hop")
	c.Flags().StringVar(&o.protocol, "protocol", "", "protocol of packets that are sent: tcp or udp to a port (default tcp), icmp without one")
	c.Flags().IntVar(&o.count, "count", 3, fmt.Sprintf("how many packets are sent, 1 to %d", inspection.MostSent))
	complete(c, "protocol", fixed([]string{inspection.ICMP, inspection.TCP, inspection.UDP}))
	return c
}

// order is what is to be sent to a destination. Without --send its other flags are wrong.
func (o *traceOptions) order(c *cobra.Command, to netip.AddrPort) (inspection.Order, error) {
	order := inspection.Order{Protocol: o.protocol, To: to, Count: o.count}
	if !o.send {
		for _, name := range []string{"protocol", "count"} {
			if c.Flags().Changed(name) {
				return order, fmt.Errorf("--%s needs --send", name)
			}
		}
		return order, nil
	}
	if order.Protocol == "" {
		order.Protocol = inspection.TCP
		if to.Port() == 0 {
			order.Protocol = inspection.ICMP
		}
	}
	return order, order.Validate()
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
func (o *traceOptions) follow(ctx context.Context, namespace, name string, order inspection.Order) error {
	e, err := o.examiner()
	if err != nil {
		return err
	}
	within := o.timeout
	if o.send {
		within += sentWithin
	}
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	var p diagnosis.Path
	if o.send {
		p, err = e.Send(ctx, namespace, name, order)
	} else {
		p, err = e.Trace(ctx, namespace, name, order.To)
	}
	if err != nil {
		return err
	}
	if err := o.showPath(p); err != nil {
		return err
	}
	switch {
	case o.send && (p.Sending == nil || !p.Sending.Complete()):
		return errUnanswered
	case !o.send && p.Lost != "":
		return errLost
	}
	return nil
}

// showPath prints a path as a table of hops.
func (o *whyOptions) showPath(p diagnosis.Path) error {
	if o.format != formatTable {
		return o.print(p, nil, nil)
	}
	var rows [][]string
	for i, h := range p.Hops {
		rows = append(rows, hopRow(i, h, p.Sending != nil))
	}
	printf(o.Out, "%s\n", p.Subject)
	if len(rows) > 0 {
		header := []string{"HOP", "WHERE", "FROM", "TO", "RULE", "TABLE", "BY", "NOTE"}
		if p.Sending != nil {
			header = slices.Insert(header, len(header)-1, "COUNT")
		}
		if err := o.print(p, header, rows); err != nil {
			return err
		}
	}
	for _, text := range p.Unknown {
		printf(o.Out, "? %s\n", text)
	}
	if p.Lost == "" && len(p.Sources) > 0 {
		printf(o.Out, "The destination sees %s\n", strings.Join(p.Sources, " or "))
	}
	if s := p.Sending; s != nil {
		printf(o.Out, "Sent %s by %s: %s\n", plan.Count(len(s.Packets), "packet", "packets"), s.Protocol, s.Verdict)
	}
	return nil
}

// hopRow is a hop in a table, with its count if packets were sent.
func hopRow(i int, h diagnosis.PathHop, sent bool) []string {
	rule, _, _ := strings.Cut(h.Rule, ":")
	table := ""
	if h.Table != 0 {
		table = strconv.Itoa(h.Table)
	}
	by := strings.Join(h.Links, ",")
	if h.Gateway != "" {
		by += " via " + h.Gateway
	}
	row := []string{strconv.Itoa(i + 1), h.Where, h.From, h.To, rule, table, cmp.Or(by, h.Route)}
	if sent {
		count := "?"
		if h.Count != nil {
			count = h.Count.String()
		}
		row = append(row, count)
	}
	note := h.Note
	if h.Dropped != "" {
		note = "LOST: " + h.Dropped
	}
	return append(row, note)
}
