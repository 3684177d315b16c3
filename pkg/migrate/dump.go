package migrate

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/coilv1"
)

// Dump ends Coil v1, and writes what takes the place of its data.
type Dump struct {
	Cluster
	// Read returns v1's data as they are at one revision of etcd.
	Read func(context.Context) (entries []coilv1.Entry, revision int64, err error)
	// Check returns why Write can't be expected to work. It is called before the first change.
	Check func() error
	// Write gets the YAML of AddressPools and AddressBlocks, once.
	Write func([]byte) error
	// SkipUninstall leaves v1's objects alone; nothing of it may run then.
	SkipUninstall bool
	// DryRun changes nothing, and writes what would be written now.
	DryRun bool
	// Timeout bounds the wait for the end of v1's pods.
	Timeout time.Duration

	done done
}

// done is what a run of Dump has done so far.
type done struct {
	begun       bool // a change may have been made
	deleted     int  // objects of v1
	uninstalled bool // all of v1 was deleted, maybe by an earlier run
	written     bool
	annotated   int // namespaces
}

// String says it in an error.
func (d done) String() string {
	var all []string
	switch {
	case d.uninstalled:
		all = append(all, "Coil v1 was deleted")
	case d.deleted > 0:
		all = append(all, plan.Count(d.deleted, "object of Coil v1 was deleted", "objects of Coil v1 were deleted"))
	default:
		all = append(all, "this run deleted nothing")
	}
	if d.written {
		all = append(all, "the YAML was written")
	} else {
		all = append(all, "no YAML was written")
	}
	if d.annotated > 0 {
		all = append(all, plan.Count(d.annotated, "namespace was annotated", "namespaces were annotated"))
	}
	return strings.Join(all, ", ")
}

// translation is what takes the place of v1's data.
type translation struct {
	pools      []*v2.AddressPool
	blocks     []*v2.AddressBlock
	namespaces []string // that get the annotation of the pool of their name
	addresses  int      // in use
	revision   int64
}

// Run refuses data or a cluster that it doesn't understand before it changes anything. Then it deletes v1's objects,
// waits for the end of v1's pods, reads etcd, writes the YAML, and annotates namespaces, in this order. An error says what
// was changed.
func (d *Dump) Run(ctx context.Context) error {
	d.done = done{}
	err := d.run(ctx)
	switch {
	case err == nil:
		return nil
	case !d.done.begun:
		return fmt.Errorf("nothing was changed: %w", caused(ctx, err))
	}
	return fmt.Errorf("%w; %v: run dump again", caused(ctx, err), d.done)
}

func (d *Dump) run(ctx context.Context) error {
	before, err := d.translate(ctx)
	if err != nil {
		return err
	}
	if d.SkipUninstall {
		if err := d.refuseRunning(ctx); err != nil {
			return err
		}
	}
	if d.DryRun {
		return d.preview(ctx, before)
	}
	// Without v1, pods wait for the YAML: it must not turn out then that there is no place for it.
	if err := d.Check(); err != nil {
		return fmt.Errorf("check the place of the YAML: %w", err)
	}
	d.done.begun = true
	if !d.SkipUninstall {
		if err := d.uninstall(ctx); err != nil {
			return err
		}
	}
	t, err := d.translate(ctx)
	if err != nil {
		return err
	}
	if err := d.write(t); err != nil {
		return err
	}
	for _, name := range t.namespaces {
		if err := d.annotate(ctx, name); err != nil {
			return err
		}
	}
	d.say("Next: apply the definitions (CRDs) of Coil, then this YAML, then Coil")
	return nil
}

// preview tells what Run would do.
func (d *Dump) preview(ctx context.Context, t translation) error {
	if !d.SkipUninstall {
		rest, err := d.rest(ctx)
		if err != nil {
			return err
		}
		there, err := present(ctx, append(d.workloads(), rest...))
		if err != nil {
			return err
		}
		for _, o := range there {
			d.say("Would delete %s of Coil v1", o)
		}
	}
	for _, name := range t.namespaces {
		d.say("Would annotate namespace %s with %s=%s", name, v2.AnnotationPool, name)
	}
	return d.write(t)
}

// translate reads etcd, and compares it with the cluster.
func (d *Dump) translate(ctx context.Context) (translation, error) {
	entries, revision, err := d.Read(ctx)
	if err != nil {
		return translation{}, err
	}
	if len(entries) == 0 {
		return translation{}, errors.New("etcd has no key of Coil v1: give its prefix (--etcd-prefix) and its endpoints")
	}
	state, err := coilv1.Parse(entries)
	if err != nil {
		return translation{}, fmt.Errorf("etcd's data at revision %d:\n%w", revision, err)
	}
	t := translation{revision: revision}
	if t.pools, t.blocks, err = state.Objects(); err != nil {
		return translation{}, err
	}
	for _, b := range state.Blocks {
		t.addresses += len(b.Used)
	}
	if t.namespaces, err = d.toAnnotate(ctx, t.pools); err != nil {
		return translation{}, err
	}
	return t, d.compare(ctx, t)
}

// compare refuses a cluster with AddressBlocks that aren't reserved, or with AddressPools and AddressBlocks that differ from
// what is to be written: then this Coil gives addresses already, and v1's data are old.
func (d *Dump) compare(ctx context.Context, t translation) error {
	var errs []error
	pools, err := d.Coil.CoilV2().AddressPools().List(ctx, metav1.ListOptions{})
	if ignoreMissing(err) != nil {
		return fmt.Errorf("list AddressPools: %w", err)
	} else if err == nil {
		have := map[string]v2.AddressPoolSpec{}
		for _, p := range pools.Items {
			have[p.Name] = p.Spec
		}
		for _, p := range t.pools {
			if spec, ok := have[p.Name]; ok && !reflect.DeepEqual(spec, p.Spec) {
				errs = append(errs, fmt.Errorf("AddressPool %s exists, and differs from v1's pool", p.Name))
			}
		}
	}
	blocks, err := d.Coil.CoilV2().AddressBlocks().List(ctx, metav1.ListOptions{})
	if ignoreMissing(err) != nil {
		return fmt.Errorf("list AddressBlocks: %w", err)
	} else if err == nil {
		for _, have := range blocks.Items {
			if have.Labels[v2.LabelReserved] != v2.ReservedValue {
				return errors.Join(append(errs, given(&have, t.namespaces))...)
			}
			for _, b := range t.blocks {
				if overlap(&have, b) && !sameReserved(&have, b) {
					errs = append(errs, fmt.Errorf("AddressBlock %s of node %s exists, and isn't what v1's data ask for: %s, reserved, of node %s",
						have.Name, have.Labels[v2.LabelNode], *b.IPv4, b.Labels[v2.LabelNode]))
				}
			}
		}
	}
	return errors.Join(errs...)
}

// given says that pods get addresses from a block. namespaces are those that a run which was killed didn't annotate any more.
func given(b *v2.AddressBlock, namespaces []string) error {
	missing := ""
	for _, name := range namespaces {
		missing += fmt.Sprintf("; annotate namespace %s with %s=%s before, which dump would do", name, v2.AnnotationPool, name)
	}
	return fmt.Errorf("AddressBlock %s of node %s isn't reserved: this Coil gives addresses already, and dump's work is done: "+
		"go on with coil-migrator replace%s. If Coil was removed since then, its AddressBlocks have to go, too, before dump can begin again",
		b.Name, b.Labels[v2.LabelNode], missing)
}

// ignoreMissing returns err unless it says that the kind isn't defined yet.
func ignoreMissing(err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// overlap reports whether two blocks have an address or the name in common.
func overlap(a, b *v2.AddressBlock) bool {
	if a.Name == b.Name {
		return true
	}
	for _, p := range ipam.Prefixes(a.IPv4) {
		for _, q := range ipam.Prefixes(b.IPv4) {
			if p.Overlaps(q) {
				return true
			}
		}
	}
	return false
}

// sameReserved reports whether have is the block that b asks for.
func sameReserved(have, b *v2.AddressBlock) bool {
	for _, l := range []string{v2.LabelPool, v2.LabelNode, v2.LabelReserved} {
		if have.Labels[l] != b.Labels[l] {
			return false
		}
	}
	return have.Name == b.Name && have.IPv4 != nil && *have.IPv4 == *b.IPv4
}

// toAnnotate returns the namespaces that have the name of a pool, and lack its annotation: v1 gave their pods addresses
// of that pool.
func (d *Dump) toAnnotate(ctx context.Context, pools []*v2.AddressPool) ([]string, error) {
	var names []string
	var errs []error
	for _, p := range pools {
		ns, err := d.Kube.CoreV1().Namespaces().Get(ctx, p.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			continue
		} else if err != nil {
			return nil, fmt.Errorf("get namespace %s: %w", p.Name, err)
		}
		switch have, ok := ns.Annotations[v2.AnnotationPool]; {
		case !ok:
			names = append(names, p.Name)
		case have != p.Name:
			errs = append(errs, fmt.Errorf("namespace %s has the annotation %s=%s, but v1 gives its pods addresses of pool %s: correct or remove the annotation",
				p.Name, v2.AnnotationPool, have, p.Name))
		}
	}
	return names, errors.Join(errs...)
}

func (d *Dump) annotate(ctx context.Context, name string) error {
	patch := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:%q}}}`, v2.AnnotationPool, name)
	_, err := d.Kube.CoreV1().Namespaces().Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{})
	if apierrors.IsNotFound(err) {
		return nil // it was deleted meanwhile
	}
	if err != nil {
		return fmt.Errorf("annotate namespace %s: %w", name, err)
	}
	d.done.annotated++
	d.say("Annotated namespace %s with %s=%s", name, v2.AnnotationPool, name)
	return nil
}

func (d *Dump) write(t translation) error {
	var out bytes.Buffer
	fmt.Fprintf(&out, "# The data of Coil v1 in etcd, revision %d: %d pools, and %d blocks with %d addresses in use.\n",
		t.revision, len(t.pools), len(t.blocks), t.addresses)
	for _, p := range t.pools {
		if err := document(&out, p); err != nil {
			return err
		}
	}
	for _, b := range t.blocks {
		if err := document(&out, b); err != nil {
			return err
		}
	}
	if err := d.Write(out.Bytes()); err != nil {
		return fmt.Errorf("write the YAML: %w", err)
	}
	did := "Would write"
	if !d.DryRun {
		did, d.done.written = "Wrote", true
	}
	d.say("%s %d AddressPools and %d reserved AddressBlocks with %d addresses in use", did, len(t.pools), len(t.blocks), t.addresses)
	return nil
}

// document appends an object as a document of YAML, without a status, which only the API server's answers have.
func document(out *bytes.Buffer, object any) error {
	text, err := yaml.Marshal(object)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "---\n%s", text)
	return nil
}
