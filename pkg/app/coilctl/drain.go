package coilctl

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/coil-net/coil/generated/clientset/versioned"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/drain"
)

// drainOptions are the flags of the command pools drain.
type drainOptions struct {
	*tool
	follow, undo, dryRun, yes, force bool
	parallel                         int

	client versioned.Interface
	core   kubernetes.Interface
}

// drain returns the command that empties an AddressPool.
func (t *tool) drain() *cobra.Command {
	o := &drainOptions{tool: t}
	c := &cobra.Command{
		Use: "drain POOL", Short: "Have an AddressPool give nothing new, and move its pods to other pools", Args: exactly(1),
		Long: "Have an AddressPool give nothing new (spec.drain). With --follow, move the pods that have addresses of it as well, by eviction: their successors get addresses of the pool " +
			"that their namespace names by then.\n\n" +
			"An eviction respects PodDisruptionBudgets: one that is refused is tried again until it succeeds. Volumes of the type emptyDir are lost with their pods. " +
			"Pods of DaemonSets are evicted, too. These pods stay: those of namespaces that still name the pool, static ones, and those without a controller unless --force is given. " +
			"The command ends when nothing is left, or nothing that it can move. It may be interrupted, and started again.\n\n" +
			"It needs the right to get and patch addresspools and to list addressblocks of coil.cybozu.com, to list namespaces and pods and, with --follow, to get pods and to create pods/eviction.",
		Example:           "  coilctl pools drain blue --dry-run\n  coilctl pools drain blue --follow\n  coilctl pools drain blue --undo",
		ValidArgsFunction: t.completeName(resourcePools),
		RunE:              func(c *cobra.Command, args []string) error { return o.run(c.Context(), args[0]) },
	}
	c.Flags().BoolVar(&o.follow, "follow", false, "evict the pods that have addresses of the pool, until nothing is left")
	c.Flags().BoolVar(&o.undo, "undo", false, "have the pool give addresses again; pods that were moved stay where they are")
	c.Flags().BoolVar(&o.dryRun, "dry-run", false, "only show what has addresses of the pool, and what would become of it")
	c.Flags().BoolVarP(&o.yes, "yes", "y", false, "don't ask before it begins")
	c.Flags().BoolVar(&o.force, "force", false, "also evict pods without a controller, which nobody makes again")
	c.Flags().IntVar(&o.parallel, "parallel", 1, "how many pods may be on their way out at a time")
	c.MarkFlagsMutuallyExclusive("undo", "follow")
	return c
}

func (o *drainOptions) run(ctx context.Context, name string) error {
	if o.parallel < 1 {
		return fmt.Errorf("--parallel can't be %d: it must be 1 or more", o.parallel)
	}
	if err := o.connect(); err != nil {
		return err
	}
	pool, err := o.client.CoilV2().AddressPools().Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return fmt.Errorf("there is no AddressPool %s", name)
	}
	if err != nil {
		return fmt.Errorf("read AddressPool %s: %w", name, err)
	}
	if o.undo {
		return o.end(ctx, pool)
	}
	p, err := o.look(ctx, name)
	if err != nil {
		return err
	}
	if err := o.show(pool, p); err != nil || o.dryRun {
		return err
	}
	if pool.Spec.Drain && !o.follow {
		err := printf(o.says(), "\nAddressPool %s drains already. --follow moves pods.\n", name)
		return err
	}
	if !o.yes && !o.agrees(pool, len(p.Moves())) {
		return errors.New("nothing was changed: answer y, or use --yes")
	}
	if err := o.set(ctx, pool, true); err != nil {
		return err
	}
	printf(o.says(), "AddressPool %s gives nothing new\n", name)
	if !o.follow {
		return nil
	}
	if err = o.move(ctx, name, p); ctx.Err() != nil {
		err = fmt.Errorf("interrupted: AddressPool %s still drains. The same command goes on, and --undo ends that", name)
	}
	return err
}

// says is where sentences go: beside JSON or YAML not to standard output, which programs read.
func (o *drainOptions) says() io.Writer {
	if o.format == formatTable {
		return o.Out
	}
	return o.ErrOut
}

// connect makes the clients. Moving many pods makes many requests.
func (o *drainOptions) connect() error {
	cfg, err := o.config()
	if err != nil {
		return err
	}
	cfg.QPS, cfg.Burst = 50, 100
	if o.client, err = versioned.NewForConfig(cfg); err != nil {
		return err
	}
	o.core, err = kubernetes.NewForConfig(cfg)
	return err
}

// set writes spec.drain of a pool.
func (o *drainOptions) set(ctx context.Context, pool *v2.AddressPool, drain bool) error {
	if pool.Spec.Drain == drain {
		return nil
	}
	patch := `{"spec":{"drain":null}}`
	if drain {
		patch = `{"spec":{"drain":true}}`
	}
	after, err := o.client.CoilV2().AddressPools().Patch(ctx, pool.Name, types.MergePatchType, []byte(patch), metav1.PatchOptions{FieldManager: userAgent})
	switch {
	case err != nil:
		return fmt.Errorf("write spec.drain of AddressPool %s: %w", pool.Name, err)
	case after.Spec.Drain != drain:
		return fmt.Errorf("the API server has dropped spec.drain of AddressPool %s: its definition is older than coilctl", pool.Name)
	}
	return nil
}

// end has a pool give addresses again.
func (o *drainOptions) end(ctx context.Context, pool *v2.AddressPool) error {
	says := "gives addresses again"
	switch {
	case !pool.Spec.Drain:
		says = "doesn't drain"
	case o.dryRun:
		says = "would give addresses again"
	default:
		if err := o.set(ctx, pool, false); err != nil {
			return err
		}
	}
	err := printf(o.says(), "AddressPool %s %s\n", pool.Name, says)
	return err
}

// look reads what has something of a pool.
func (o *drainOptions) look(ctx context.Context, name string) (drain.Plan, error) {
	f := drain.Facts{Pool: name, Force: o.force}
	blocks, err := o.client.CoilV2().AddressBlocks().List(ctx, metav1.ListOptions{LabelSelector: v2.LabelPool + "=" + name})
	if err := listed(&f.Blocks, blocks, err); err != nil {
		return drain.Plan{}, fmt.Errorf("list AddressBlocks: %w", err)
	}
	namespaces, err := o.core.CoreV1().Namespaces().List(ctx, cached())
	if err := listed(&f.Namespaces, namespaces, err); err != nil {
		return drain.Plan{}, fmt.Errorf("list Namespaces: %w", err)
	}
	p := drain.New(f)
	if err := eachPod(ctx, o.core, p.Add); err != nil {
		return drain.Plan{}, err
	}
	return p.Plan(), nil
}

// show prints what has something of a pool, and what becomes of it.
func (o *drainOptions) show(pool *v2.AddressPool, p drain.Plan) error {
	var rows [][]string
	for _, pod := range p.Pods {
		does := "evict"
		switch {
		case pod.Ending:
			does = "is ending"
		case pod.Stays != "":
			does = "stays: " + pod.Stays
		case !o.follow && !o.dryRun:
			does = ""
		}
		rows = append(rows, []string{pod.Node, pod.Namespace, pod.Name, pod.Address, does})
	}
	if o.format != formatTable || len(rows) > 0 {
		if err := o.print(p, []string{"NODE", "NAMESPACE", "POD", "ADDRESS", "ACTION"}, rows); err != nil || o.format != formatTable {
			return err
		}
		printf(o.says(), "\n")
	}
	printf(o.says(), "AddressPool %s: %s of it, in %s on %s\n", pool.Name, plan.Count(len(p.Pods), "pod has an address", "pods have addresses"),
		plan.Count(p.Blocks, "block", "blocks"), plan.Count(p.Nodes, "node", "nodes"))
	for _, line := range unmoved(p) {
		printf(o.says(), "%s\n", line)
	}
	if len(p.Naming) > 0 {
		printf(o.says(), "New pods won't start in %s that %s the pool: %s. Name another one in the annotation %s first.\n",
			plan.Count(len(p.Naming), "namespace", "namespaces"), map[bool]string{true: "names", false: "name"}[len(p.Naming) == 1], plan.Enumerate(p.Naming), v2.AnnotationPool)
	}
	return nil
}

// unmoved says what an eviction doesn't move.
func unmoved(p drain.Plan) (lines []string) {
	if len(p.Owners) > 0 {
		lines = append(lines, fmt.Sprintf("Floating addresses belong to %s: have them name another pool, or delete them", plan.Enumerate(p.Owners)))
	}
	if len(p.Reserved) > 0 {
		lines = append(lines, fmt.Sprintf("Reserved AddressBlocks, which only an admin deletes: %s", plan.Enumerate(p.Reserved)))
	}
	return lines
}

// agrees asks whether to begin.
func (o *drainOptions) agrees(pool *v2.AddressPool, moves int) bool {
	what := fmt.Sprintf("Have AddressPool %s give nothing new", pool.Name)
	if o.follow {
		what += fmt.Sprintf(", and evict %s", plan.Count(moves, "pod", "pods"))
	}
	printf(o.says(), "%s? [y/N] ", what)
	line, _ := bufio.NewReader(o.In).ReadString('\n')
	return slices.Contains([]string{"y", "yes"}, strings.ToLower(strings.TrimSpace(line)))
}

// isDrained returns the condition Drained of a pool, nil as long as it isn't about its present spec.
func (o *drainOptions) isDrained(ctx context.Context, name string) (*metav1.Condition, error) {
	pool, err := o.client.CoilV2().AddressPools().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("read AddressPool %s: %w", name, err)
	}
	if !pool.Spec.Drain {
		return nil, fmt.Errorf("somebody else has AddressPool %s give addresses again", name)
	}
	c := meta.FindStatusCondition(pool.Status.Conditions, v2.PoolDrained)
	if c != nil && c.ObservedGeneration != pool.Generation {
		c = nil
	}
	return c, nil
}

// pause waits, or until ctx ends.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
