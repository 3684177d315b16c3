package coilctl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"

	"github.com/coil-net/coil/pkg/plan/diagnosis"
)

// dbOptions are the flags of the commands below db.
type dbOptions struct {
	*tool
	timeout time.Duration
	file    string
	force   bool
	// ask asks the coild that is in a pod; see tool.execCoild.
	ask func(ctx context.Context, coild *corev1.Pod, out io.Writer, complaints *bounded, words ...string) error
}

// rightsOfDB are named by the help of both commands.
const rightsOfDB = "get and create pods/exec in coild's namespace, since it runs \"coild debug\" in the pod of coild: who has these can do anything on the nodes"

// db returns the commands about the record of a node.
func (t *tool) db() *cobra.Command {
	c := &cobra.Command{
		Use: "db", Short: "Copy a node's record of addresses, or compare it with the API server", Args: cobra.NoArgs,
		Long: "Copy a node's record of addresses, coild.db, or compare it with the AddressBlocks and Pods of the API server.",
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(t.dbDump(), t.dbCheck())
	return c
}

func (t *tool) dbDump() *cobra.Command {
	o := &dbOptions{tool: t, ask: t.execCoild}
	c := &cobra.Command{
		Use: "dump NODE", Short: "Get a copy of a node's record of addresses", Args: exactly(1),
		Long: "Get a copy of a node's record of addresses as a SQLite file, which coild makes while it goes on giving addresses: all of it as it is at one moment. " +
			"Whether the file is whole is checked by its length and its SHA-256. With --output=json or yaml the rows are printed, with texts as they are in the file.\n\n" +
			"Rights: list pods; " + rightsOfDB + ".",
		Example:           "  coilctl db dump worker-1\n  coilctl db dump worker-1 -f - > coild.db\n  coilctl db dump worker-1 -o json | jq '.addresses[] | select(.state == \"cooling\")'",
		ValidArgsFunction: t.completeName(resourceNodes),
		RunE:              func(c *cobra.Command, args []string) error { return o.dump(c.Context(), args[0]) },
	}
	c.Flags().DurationVar(&o.timeout, "timeout", 2*time.Minute, "the longest time for everything")
	c.Flags().StringVarP(&o.file, "filename", "f", "", "file that is written, or - for the standard output (default NODE.db)")
	c.Flags().BoolVar(&o.force, "force", false, "replace a file that is there")
	return c
}

func (t *tool) dbCheck() *cobra.Command {
	o := &dbOptions{tool: t}
	c := &cobra.Command{
		Use: "check NODE", Short: "Compare a node's record of addresses with the API server", Args: exactly(1),
		Long: "Compare a node's record of addresses with the AddressBlocks and the Pods of the node, have SQLite check the file, and say what to do about each fault. " +
			"It looks twice, some seconds apart: what is only on its way isn't a fault. Nothing is changed. The exit code is 1 if something is wrong.\n\n" +
			"Rights: list pods; list addressblocks, addresspools of coil.cybozu.com; get nodes; " + rightsOfDB + ".",
		Example:           "  coilctl db check worker-1\n  coilctl db check worker-1 -o json",
		ValidArgsFunction: t.completeName(resourceNodes),
		RunE:              func(c *cobra.Command, args []string) error { return o.check(c.Context(), args[0]) },
	}
	c.Flags().DurationVar(&o.timeout, "timeout", time.Minute, "the longest time for all that is read and asked")
	return c
}

// check compares a record, and prints what was found.
func (o *dbOptions) check(ctx context.Context, node string) error {
	c, err := o.connect()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	d, err := Examiner{Core: c.core, Coil: c.coil, Record: o.record, Ahead: o.clock.off}.Database(ctx, node)
	if err != nil {
		return err
	}
	if err := (&whyOptions{tool: o.tool}).show(d); err != nil {
		return err
	}
	if len(d.Wrong()) > 0 {
		return errWrong
	}
	return nil
}

// lookAgain is how long after the first look at a record the second one comes.
const lookAgain = 3 * time.Second

// Database compares a node's record with the API server. Faults that it finds once are looked for again.
func (e Examiner) Database(ctx context.Context, node string) (diagnosis.Diagnosis, error) {
	first := e.database(ctx, node)
	if len(first.Wrong()) == 0 {
		return first, nil
	}
	if err := pause(ctx, lookAgain); err != nil {
		return first, fmt.Errorf("look again: %w", err)
	}
	return diagnosis.Confirmed(first, e.database(ctx, node)), nil
}

// database is one look.
func (e Examiner) database(ctx context.Context, node string) diagnosis.Diagnosis {
	var f diagnosis.DatabaseFacts
	r := e.reading(&f.Facts)
	r.pools(ctx)
	r.do(diagnosis.KindBlocks, func() error { return r.allBlocks(ctx) })
	r.do(diagnosis.KindNode, func() (err error) {
		f.Node, err = found(r.Core.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{}))
		return err
	})
	r.do(diagnosis.KindPods, func() error {
		o := cached()
		o.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", node).String()
		l, err := r.Core.CoreV1().Pods(metav1.NamespaceAll).List(ctx, o)
		return listed(&f.Pods, l, err)
	})
	r.do(diagnosis.KindCoilds, func() (err error) {
		if f.Coilds, err = coildsOf(ctx, r.Core, node); err != nil {
			return err
		}
		coild := running(f.Coilds)
		if coild == nil {
			return nil
		}
		if f.Database, err = r.Record(ctx, coild); err != nil {
			f.Database, f.Unanswered = nil, err.Error()
		}
		return nil
	})
	r.wait()
	return diagnosis.Database(node, f)
}

// coild returns the pod of coild that can be asked about a node.
func (o *dbOptions) coild(ctx context.Context, node string) (*corev1.Pod, error) {
	core, err := o.core()
	if err != nil {
		return nil, err
	}
	all, err := coildsOf(ctx, core, node)
	if err != nil {
		return nil, fmt.Errorf("list pods of coild: %w", err)
	}
	pod := running(all)
	if pod == nil {
		return nil, fmt.Errorf("no pod of coild runs on node %s: see coilctl why node %s", node, node)
	}
	return pod, nil
}

// errTerminal keeps a terminal from showing what isn't text.
var errTerminal = errors.New("a SQLite file isn't for a terminal: use --filename, or --output=json for its rows")
