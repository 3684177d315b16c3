package coilctl

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/fencing"
)

// releaseOptions are the flags of the command blocks release.
type releaseOptions struct {
	*tool
	force, dryRun, yes bool
	timeout            time.Duration

	on clients
}

// release returns the command that takes a block from a node.
func (t *tool) release() *cobra.Command {
	o := &releaseOptions{tool: t}
	c := &cobra.Command{
		Use: "release BLOCK", Short: "Take an AddressBlock from a node that will not give it back", Args: exactly(1),
		Long: "Take an AddressBlock from a node that will not give it back, so that its addresses are free. It is needed seldom: coild gives a block back when its last address has cooled down, and coil-ipam-controller frees " +
			"the blocks of a Node that was deleted after a quarantine of ten minutes. Without --force it only says who has the block, and whether it may be taken.\n\n" +
			"A block isn't taken while a pod has an address of it, nor unless one of these is certain: the Node doesn't exist; or the Node isn't ready and has the taint " + corev1.TaintNodeOutOfService +
			", by which an admin says that the machine is off; or coild of the node answers, and its record has neither the block nor an address of it. It asks for the name of the block. " +
			"A machine that runs all the same has addresses that others get: turn it off first.\n\n" +
			"Rights: get nodes; get, delete, patch addressblocks of coil.cybozu.com; list pods; " + rightsOfDB + ". Without pods/exec coild isn't asked.",
		Example:           "  coilctl blocks release default-7 --dry-run\n  coilctl blocks release default-7 --force",
		ValidArgsFunction: t.completeName(resourceBlocks),
		RunE:              func(c *cobra.Command, args []string) error { return o.run(c.Context(), args[0]) },
	}
	c.Flags().BoolVar(&o.force, "force", false, "take the block, if that is safe")
	c.Flags().BoolVar(&o.dryRun, "dry-run", false, "only show who has the block, and whether it may be taken")
	c.Flags().BoolVarP(&o.yes, "yes", "y", false, "don't ask for the name of the block")
	c.Flags().DurationVar(&o.timeout, "timeout", time.Minute, "the longest time for all that is read before it asks, and again after that")
	return c
}

// errRefused says that a block isn't taken, which was explained.
var errRefused = errors.New("the block isn't taken")

func (o *releaseOptions) run(ctx context.Context, name string) (err error) {
	if o.on, err = o.connect(); err != nil {
		return err
	}
	f, err := o.look(ctx, name)
	if err != nil {
		return err
	}
	v := fencing.Judge(f)
	if err := o.show(v); err != nil {
		return err
	}
	switch {
	case len(v.Refused) > 0:
		return errRefused
	case o.dryRun:
		return nil
	case !o.force:
		return errors.New("nothing was changed: use --force to take the block")
	case !o.yes && !o.agrees(v):
		return errors.New("nothing was changed: answer with the name of the block, or use --yes")
	}
	return o.take(ctx, f.Block, v.Fence)
}

// look reads what is known of a block.
func (o *releaseOptions) look(ctx context.Context, name string) (f fencing.Facts, err error) {
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	if f.Block, err = o.block(ctx, name); err != nil {
		return f, err
	}
	if f.Block == nil {
		return f, fmt.Errorf("there is no AddressBlock %s", name)
	}
	node := f.Block.Labels[v2.LabelNode]
	if node != "" {
		if f.Node, err = found(o.on.core.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})); err != nil {
			return f, fmt.Errorf("read Node %s: %w", node, err)
		}
	}
	err = eachPod(ctx, o.on.core, func(p *corev1.Pod) {
		if _, has := fencing.Has(f.Block, p); has {
			f.Pods = append(f.Pods, p)
		}
	})
	if err != nil {
		return f, err
	}
	if f.Node == nil {
		return f, nil
	}
	coilds, err := coildsOf(ctx, o.on.core, node)
	if err != nil {
		return f, fmt.Errorf("list pods of coild: %w", err)
	}
	if coild := running(coilds); coild != nil {
		asking, cancel := context.WithTimeout(ctx, o.timeout/2)
		defer cancel()
		if f.Database, err = o.record(asking, coild); err != nil {
			f.Database, f.Unanswered = nil, err.Error()
		}
	}
	return f, nil
}

// block reads a block, nil if there is none.
func (o *releaseOptions) block(ctx context.Context, name string) (*v2.AddressBlock, error) {
	b, err := found(o.on.coil.CoilV2().AddressBlocks().Get(ctx, name, metav1.GetOptions{}))
	if err != nil {
		return nil, fmt.Errorf("read AddressBlock %s: %w", name, err)
	}
	return b, nil
}

// show prints who has a block, and what may be done.
func (o *releaseOptions) show(v fencing.Verdict) error {
	if o.format != formatTable {
		return o.print(v, nil, nil)
	}
	var b strings.Builder
	printf(&b, "AddressBlock %s: %s\n", v.Block, v.Held)
	for _, p := range v.Pods {
		printf(&b, "Pod %s/%s of node %s has %s\n", p.Namespace, p.Name, p.Node, p.Address)
	}
	for _, why := range v.Refused {
		printf(&b, "It isn't taken: %s\n", why)
	}
	if len(v.Refused) == 0 {
		printf(&b, "It may be taken: %s\n", v.Fence)
		switch v.Fence {
		case fencing.Replaced:
			printf(&b, "coil-ipam-controller frees it by itself, ten minutes after the coild of the node said that nobody there uses it. Don't hurry it unless the machine that had it is off, or is this one\n")
		case fencing.Gone:
			printf(&b, "coil-ipam-controller frees it by itself, ten minutes after the Node was deleted. Don't hurry it unless the machine is off\n")
		}
	}
	_, err := io.WriteString(o.Out, b.String())
	return err
}

// agrees asks for the name of a block.
func (o *releaseOptions) agrees(v fencing.Verdict) bool {
	printf(o.ErrOut, "Others get its addresses. Type %s to take it from node %s: ", v.Block, v.Node)
	line, _ := bufio.NewReader(o.In).ReadString('\n')
	return strings.TrimSpace(line) == v.Block
}

// take deletes a block, looks again whether that is safe, and lets it go. A block that somebody else changes meanwhile isn't taken; one that was deleted and isn't safe any more
// stays locked by its finalizer, and gives no address.
func (o *releaseOptions) take(ctx context.Context, b *v2.AddressBlock, fence fencing.Fence) error {
	if b.DeletionTimestamp == nil {
		as := metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &b.UID, ResourceVersion: &b.ResourceVersion}}
		if err := o.on.coil.CoilV2().AddressBlocks().Delete(ctx, b.Name, as); err != nil && !apierrors.IsNotFound(err) {
			return o.changed("delete", b, err)
		}
	}
	live, err := o.block(ctx, b.Name)
	if err != nil {
		return err
	}
	if live == nil || live.UID != b.UID {
		return o.taken(b)
	}
	// Nobody gives an address of a block that is deleted. Whoever did before that is seen now.
	f, err := o.look(ctx, b.Name)
	if err != nil {
		return fmt.Errorf("AddressBlock %s is deleted, and locked: look again: %w", b.Name, err)
	}
	v := fencing.Judge(f)
	if f.Block.UID != b.UID || v.Fence != fence || len(v.Refused) > 0 {
		if err := o.show(v); err != nil {
			return err
		}
		return fmt.Errorf("%w: it was used meanwhile. It is deleted, and locked until its node gives it back, or the same command succeeds", errRefused)
	}
	rest := slices.DeleteFunc(slices.Clone(f.Block.Finalizers), func(s string) bool { return s == v2.Finalizer })
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": f.Block.UID, "resourceVersion": f.Block.ResourceVersion, "finalizers": rest}})
	if err != nil {
		return err
	}
	_, err = o.on.coil.CoilV2().AddressBlocks().Patch(ctx, b.Name, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: userAgent})
	if err != nil && !apierrors.IsNotFound(err) {
		return o.changed("remove the finalizer of", b, err)
	}
	return o.taken(b)
}

// changed is the error of a write that was refused.
func (o *releaseOptions) changed(what string, b *v2.AddressBlock, err error) error {
	if apierrors.IsConflict(err) {
		return fmt.Errorf("AddressBlock %s was changed meanwhile: look again: %w", b.Name, err)
	}
	return fmt.Errorf("%s AddressBlock %s: %w", what, b.Name, err)
}

func (o *releaseOptions) taken(b *v2.AddressBlock) error {
	err := printf(o.ErrOut, "AddressBlock %s is taken from node %s\n", b.Name, b.Labels[v2.LabelNode])
	return err
}
