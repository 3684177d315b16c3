package coilctl

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/coil-net/coil/pkg/plan/health"
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
		Long: "Tell what is wrong in the cluster, on one screen. The exit code is 1 if something is wrong.\n\n" +
			"Rights: " + rights(everything) + "; get leases of coordination.k8s.io in the namespace " + preflight.Namespace + ".",
		Example: "  coilctl status\n  coilctl status --wait=2m",
		RunE:    func(c *cobra.Command, _ []string) error { return o.run(c.Context()) },
	}
	c.Flags().DurationVar(&o.wait, "wait", 0, "for how long to wait until nothing is wrong")
	return c
}

func (o *statusOptions) run(ctx context.Context) error {
	var seen health.Overview
	var now time.Time
	for end := time.Now().Add(o.wait); ; {
		f, err := o.read(ctx, everything)
		if err == nil {
			err = o.leases(ctx, &f)
		}
		left := time.Until(end)
		if err != nil && (left <= 0 || !errors.Is(err, errNotInstalled) && !unanswered(err)) {
			return err
		}
		if seen, now = health.Look(f), f.Now; err == nil && (len(seen.Findings) == 0 || left <= 0) {
			break
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(min(again, left)):
		}
	}
	if err := o.show(seen, now); err != nil {
		return err
	}
	if len(seen.Findings) > 0 {
		return errFindings
	}
	return nil
}

// show prints an overview of a moment.
func (o *statusOptions) show(seen health.Overview, now time.Time) error {
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
			since = " for " + duration.HumanDuration(now.Sub(f.Since.Time))
		}
		printf(o.Out, "\n%s: %s%s\n  %s\n", f.Object(), f.Reason, since, f.Message)
	}
	return nil
}
