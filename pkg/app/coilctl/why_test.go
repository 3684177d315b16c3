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
	"github.com/coil-net/coil/pkg/plan/inspection"
)

// newWhy returns the command with flags as they are without any, and what it prints.
func newWhy() (*whyOptions, *bytes.Buffer) {
	out := &bytes.Buffer{}
	t := &tool{IOStreams: genericiooptions.IOStreams{Out: out}, flags: genericclioptions.NewConfigFlags(true), format: formatTable, colour: colourNever, clock: &clock{}}
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

func TestDestination(t *testing.T) {
	for text, want := range map[string]string{
		"203.0.113.5": "203.0.113.5:0", "203.0.113.5:443": "203.0.113.5:443", "2001:db8::5": "[2001:db8::5]:0", "[2001:db8::5]": "[2001:db8::5]:0", "[2001:db8::5]:53": "[2001:db8::5]:53",
		"::ffff:203.0.113.5": "203.0.113.5:0", "": "", "example.org": "", "203.0.113.5:x": "", "203.0.113.5:": "",
	} {
		got, err := destination(text)
		if (err == nil) != (want != "") || err == nil && got.String() != want {
			t.Errorf("%q: %s, %v; want %q", text, got, err, want)
		}
	}
}

func TestShowPath(t *testing.T) {
	p := diagnosis.Path{Subject: "From Pod shop/cart-0 to 203.0.113.5", Sources: []string{"192.0.2.7"}, Unknown: []string{"nobody says"}, Hops: []diagnosis.PathHop{
		{Where: "pod shop/cart-0", Note: "tunnel to 10.0.0.8", Hop: inspection.Hop{From: "10.0.0.1", To: "203.0.113.5", Rule: "2100: from all lookup 118", Table: 118, Links: []string{"fou4_1"}}},
		{Where: "router internet/nat-a", Hop: inspection.Hop{From: "192.0.2.7", To: "203.0.113.5", Route: "default via 10.0.0.254"}},
	}}
	o, out := newWhy()
	if err := o.showPath(p); err != nil {
		t.Fatal(err)
	}
	const want = `From Pod shop/cart-0 to 203.0.113.5
HOP   WHERE                   FROM        TO            RULE   TABLE   BY                       NOTE
1     pod shop/cart-0         10.0.0.1    203.0.113.5   2100   118     fou4_1                   tunnel to 10.0.0.8
2     router internet/nat-a   192.0.2.7   203.0.113.5                  default via 10.0.0.254
? nobody says
The destination sees 192.0.2.7
`
	if d := cmp.Diff(want, out.String()); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	p.Lost, p.Hops[1].Dropped = "it is lost", "no way"
	o, out = newWhy()
	if err := o.showPath(p); err != nil || !strings.Contains(out.String(), "LOST: no way") || strings.Contains(out.String(), "sees") {
		t.Errorf("%v: %s", err, out.String())
	}
	o, out = newWhy()
	o.format = formatJSON
	if err := o.showPath(p); err != nil || !strings.HasPrefix(out.String(), "{\n  \"subject\":") || !strings.Contains(out.String(), "\"table\": 118") {
		t.Errorf("as JSON, %v: %s", err, out.String())
	}
}
