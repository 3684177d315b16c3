package coilctl

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/coil-net/coil/pkg/plan/health"
	"github.com/coil-net/coil/pkg/plan/inventory"
	"github.com/coil-net/coil/pkg/plan/preflight"
)

// statusOptions are the flags of the command status.
type statusOptions struct {
	*tool
	wait time.Duration
}

// errFindings says that something is wrong, which was printed.
var errFindings = errors.New("the cluster needs attention")

// again is how often the command looks while it waits.
const again = 2 * time.Second

// status returns the command that tells how a cluster is.
func (t *tool) status() *cobra.Command {
	o := &statusOptions{tool: t}
	c := &cobra.Command{
		Use: "status", Short: "Tell what is wrong in the cluster, on one screen", Args: cobra.NoArgs,
		Long: "Tell what is wrong in the cluster, on one screen. The exit code is 1 if there is anything.\n\n" +
			"Rights: " + rights(everything) + "; get leases of coordination.k8s.io in the namespace " + preflight.Namespace + ".",
		Example: "  coilctl status\n  coilctl status --wait=2m",
		RunE:    func(c *cobra.Command, _ []string) error { return o.run(c.Context()) },
	}
	c.Flags().DurationVar(&o.wait, "wait", 0, "for how long to wait until nothing is wrong")
	return c
}

// kind is how many objects of a kind there are.
type kind struct {
	Kind  string `json:"kind"`
	Count int    `json:"count"`
	// Attention is how many of them have findings.
	Attention int `json:"attention"`
}

// overview is what the command status shows.
type overview struct {
	Kinds    []kind           `json:"kinds"`
	Findings []health.Finding `json:"findings"`
}

func (o *statusOptions) run(ctx context.Context) error {
	var seen overview
	for end := time.Now().Add(o.wait); ; {
		f, err := o.read(ctx, everything)
		if err == nil {
			err = o.leases(ctx, &f)
		}
		if err != nil {
			return err
		}
		seen = overviewOf(f)
		left := time.Until(end)
		if len(seen.Findings) == 0 || left <= 0 {
			break
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(min(again, left)):
		}
	}
	if err := o.show(seen); err != nil {
		return err
	}
	if len(seen.Findings) > 0 {
		return errFindings
	}
	return nil
}

// overviewOf judges the objects of a cluster.
func overviewOf(f inventory.Objects) overview {
	seen := overview{Findings: health.Findings(f)}
	seen.Kinds = []kind{
		{Kind: "AddressPool", Count: len(f.Pools)}, {Kind: "AddressBlock", Count: len(f.Blocks)},
		{Kind: "AddressClaim", Count: len(f.Claims)}, {Kind: "Egress", Count: len(f.Egresses)}, {Kind: "EgressPolicy", Count: len(f.Policies)},
		{Kind: "EgressClusterPolicy", Count: len(f.ClusterPolicies)}, {Kind: "LoadBalancerGateway", Count: len(f.Gateways)}, {Kind: "Service", Count: len(inventory.Services(f))},
		{Kind: "Node", Count: len(f.Nodes)}, {Kind: "Lease", Count: len(f.Leases)},
	}
	objects := map[string]bool{}
	for _, found := range seen.Findings {
		if objects[found.Object()] {
			continue
		}
		objects[found.Object()] = true
		for i := range seen.Kinds {
			if seen.Kinds[i].Kind == found.Kind {
				seen.Kinds[i].Attention++
			}
		}
	}
	return seen
}

// show prints an overview.
func (o *statusOptions) show(seen overview) error {
	var rows [][]string
	for _, k := range seen.Kinds {
		says := "fine"
		switch {
		case k.Attention == 1:
			says = "1 needs attention"
		case k.Attention > 1:
			says = fmt.Sprint(k.Attention, " need attention")
		case k.Count == 0:
			says = "none"
		}
		rows = append(rows, []string{k.Kind, fmt.Sprint(k.Count), says})
	}
	if err := o.print(seen, []string{"KIND", "COUNT", "STATUS"}, rows); err != nil || o.format != formatTable {
		return err
	}
	for _, f := range seen.Findings {
		since := ""
		if !f.Since.IsZero() {
			since = " for " + duration.HumanDuration(time.Since(f.Since.Time))
		}
		fmt.Fprintf(o.Out, "\n%s: %s%s\n  %s\n", f.Object(), f.Reason, since, f.Message)
	}
	return nil
}
