package coilctl

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/genericiooptions"

	"github.com/coil-net/coil/pkg/plan/diagnosis"
)

// newWhy returns the command with flags as they are without any, and what it prints.
func newWhy() (*whyOptions, *bytes.Buffer) {
	out := &bytes.Buffer{}
	t := &tool{IOStreams: genericiooptions.IOStreams{Out: out}, flags: genericclioptions.NewConfigFlags(true), format: formatTable, colour: colourNever}
	return &whyOptions{tool: t}, out
}

func TestShowWalk(t *testing.T) {
	d := diagnosis.Diagnosis{Subject: "Pod shop/cart-0", Steps: []diagnosis.Step{
		{Step: "pool", State: diagnosis.Right, Seen: "there is one"},
		{Step: "namespace", State: diagnosis.Wrong, Seen: "it isn't right", Do: "put it right"},
		{Step: "veth", State: diagnosis.Unknown, Seen: "nobody says"},
	}}
	o, out := newWhy()
	if err := o.show(d); err != nil {
		t.Fatal(err)
	}
	const want = `Pod shop/cart-0
ok     pool       there is one
WRONG  namespace  it isn't right
                  -> put it right
?      veth       nobody says
`
	if d := cmp.Diff(want, out.String()); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	o, out = newWhy()
	o.colour = colourAlways
	if err := o.show(d); err != nil || !strings.Contains(out.String(), "\x1b[31;1mWRONG\x1b[0m  namespace") {
		t.Errorf("in colours, %v: %q", err, out.String())
	}
	o, out = newWhy()
	o.format = formatYAML
	if err := o.show(d); err != nil || !strings.HasPrefix(out.String(), "steps:\n- seen: there is one\n  state: right\n  step: pool\n") {
		t.Errorf("as YAML, %v: %s", err, out.String())
	}
}

func TestNameOf(t *testing.T) {
	o, _ := newWhy()
	*o.flags.Namespace = "bank"
	for text, want := range map[string]string{"shop/cart-0": "shop/cart-0", "cart-0": "bank/cart-0", "": "", "/cart-0": "", "shop/": "", "shop/a/b": ""} {
		namespace, name, err := o.nameOf("pod", text)
		if got := namespace + "/" + name; (err == nil) != (want != "") || err == nil && got != want {
			t.Errorf("%q: %s, %v; want %q", text, got, err, want)
		}
	}
}

func TestBounded(t *testing.T) {
	b := &bounded{left: 5}
	if n, err := b.Write([]byte("hello")); n != 5 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	if _, err := b.Write([]byte("!")); !errors.Is(err, io.ErrShortBuffer) || b.String() != "hello" {
		t.Errorf("%v, %q", err, b.String())
	}
	if got := lastLine("Starting\ncoild debug: no such file\n"); got != ": coild debug: no such file" || lastLine("\n") != "" {
		t.Errorf("%q", got)
	}
}
