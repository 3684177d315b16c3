package convert

import (
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan/claims"
	"github.com/coil-net/coil/pkg/testkit"
)

var update = flag.Bool("update", false, "write what the conversions yield to testdata")

const inputs = "testdata/*.in.yaml"

// converted converts a file of testdata.
func converted(t testing.TB, file string) (Input, Result) {
	t.Helper()
	var in Input
	testkit.Check(t, in.Read(filepath.Base(file), testkit.Must(os.ReadFile(file))(t)))
	return in, testkit.Must(Convert(in, Options{EgressNamespace: "egress"}))(t)
}

// Each input becomes the objects beside it, and is told what is beside it.
func TestConversions(t *testing.T) {
	files := testkit.Must(filepath.Glob(inputs))(t)
	if len(files) < 12 {
		t.Fatalf("there are only %d inputs", len(files))
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".in.yaml")
		t.Run(name, func(t *testing.T) {
			in, result := converted(t, file)
			text := testkit.Must(result.YAML())(t)
			told := result.Text()
			for _, kind := range in.Ignored() {
				told = "ignored: " + kind + "\n" + told
			}
			for path, got := range map[string]string{"testdata/" + name + ".out.yaml": string(text), "testdata/" + name + ".txt": told} {
				if *update {
					testkit.Check(t, os.WriteFile(path, []byte(got), 0o644))
				}
				if diff := cmp.Diff(string(testkit.Must(os.ReadFile(path))(t)), got); diff != "" {
					t.Errorf("%s (-want +got):\n%s", path, diff)
				}
			}
			_, again := converted(t, file)
			if diff := cmp.Diff(string(text), string(testkit.Must(again.YAML())(t))); diff != "" || again.Text() != result.Text() {
				t.Errorf("the second time it is another one: %s", diff)
			}
		})
	}
}

// The API's bounds hold, and an Egress gets exactly the addresses of its list, each of which its pool has.
func TestAddressesAreThePools(t *testing.T) {
	for _, file := range testkit.Must(filepath.Glob(inputs))(t) {
		t.Run(filepath.Base(file), func(t *testing.T) {
			_, result := converted(t, file)
			checkAddresses(t, result)
		})
	}
}

// checkAddresses is for fuzzing, too.
func checkAddresses(t *testing.T, result Result) {
	t.Helper()
	pools := map[string]ipam.Pool{}
	for _, o := range result.Objects {
		p, ok := o.Object.(*v2.AddressPool)
		if !ok {
			continue
		}
		var subnets []ipam.Subnet
		for _, s := range p.Spec.Subnets {
			subnets = append(subnets, testkit.Must(ipam.ParseSubnet(s.IPv4, s.IPv6))(t))
		}
		pools[p.Name] = testkit.Must(ipam.NewPool(0, subnets))(t)
		if len(subnets) > maxSubnets {
			t.Errorf("AddressPool %s has %d subnets", p.Name, len(subnets))
		}
	}
	for _, o := range result.Objects {
		e, ok := o.Object.(*v2.Egress)
		if !ok {
			continue
		}
		if len(e.Spec.Destinations) > maxDestinations {
			t.Errorf("Egress %s has %d destinations", e.Name, len(e.Spec.Destinations))
		}
		if !e.Spec.Addresses.Float() {
			continue
		}
		indexes, problems := claims.Indexes(e.Spec.Addresses.List, pools[e.Spec.Addresses.Pool])
		if len(problems) > 0 || len(indexes) == 0 || len(e.Spec.Addresses.List) > maxList {
			t.Errorf("Egress %s gets %d addresses by %d entries: %v", e.Name, len(indexes), len(e.Spec.Addresses.List), problems)
		}
	}
}

// What the former systems refuse, and what can't be read, is an error with its place.
func TestErrors(t *testing.T) {
	const gateway = "apiVersion: egressgateway.spidernet.io/v1beta1\nkind: EgressGateway\nmetadata: {name: g}\nspec: "
	const policy = "apiVersion: egressgateway.spidernet.io/v1beta1\nkind: EgressPolicy\nmetadata: {name: p, namespace: a}\nspec: "
	const selected = "appliedTo: {podSelector: {matchLabels: {app: a}}}"
	for name, c := range map[string]struct{ text, want string }{
		"not YAML":           {"# one\n---\na: b\n c: d\n", "f: document 1, line 3: yaml: line 4: "},
		"after a document":   {"a: 1\n---\n\nkind: X\napiVersion: v1\n", "f: document 1, line 1: the object has no apiVersion or no kind"},
		"the second one":     {"kind: X\napiVersion: v1\n---\n# a comment\n\nx: 1\n", "f: document 2, line 6: the object has no apiVersion or no kind"},
		"twice a key":        {gateway + "{clusterDefault: true, clusterDefault: false}", `key "clusterDefault" already set`},
		"twice in JSON":      {`{"apiVersion":"egressgateway.spidernet.io/v1beta1","kind":"EgressGateway","metadata":{"name":"g","name":"h"}}`, `duplicate field "metadata.name"`},
		"another type":       {gateway + "{ippools: {ipv4: 7}}", "EgressGateway g: json: cannot unmarshal number"},
		"another version":    {"apiVersion: egressgateway.spidernet.io/v1\nkind: EgressGateway\nmetadata: {name: g}\n", "EgressGateway has version v1, and only v1beta1 is known"},
		"no name":            {"apiVersion: egressgateway.spidernet.io/v1beta1\nkind: EgressGateway\n", `metadata.name of the EgressGateway can't be ""`},
		"a name with a line": {"apiVersion: staticegressips.nirmata.io/v1alpha1\nkind: StaticEgressIP\nmetadata: {name: \"a\\nb\"}\n", `can't be "a\nb"`},
		"a namespace":        {"apiVersion: egressgateway.spidernet.io/v1beta1\nkind: EgressGateway\nmetadata: {name: g, namespace: a}\n", "EgressGateway a/g is of no namespace"},
		"the same twice":     {gateway + "{}\n---\n" + gateway + "{}", "document 2, line 6: EgressGateway g is there twice: first at f:1"},
		"an item":            {"apiVersion: v1\nkind: List\nitems: [{kind: X, apiVersion: v1}, {kind: X}]", "f: document 1, line 1: item 2: the object has no apiVersion or no kind"},
		"an address":         {gateway + "{ippools: {ipv4: [198.51.100.300]}}", `f:1: EgressGateway g: spec.ippools.ipv4: "198.51.100.300" isn't an address, a range a-b or a CIDR`},
		"the other family":   {gateway + `{ippools: {ipv4: ["2001:db8::1"]}}`, "isn't of the list's family"},
		"multicast":          {gateway + "{ippools: {ipv4: [224.0.0.1]}}", "can't be the source of packets"},
		"a range":            {gateway + "{ippools: {ipv4: [198.51.100.9-198.51.100.1]}}", "isn't a range of addresses"},
		"the default":        {gateway + "{ippools: {ipv4: [198.51.100.0/30], ipv4DefaultEIP: 198.51.100.0}}", "198.51.100.0 isn't an address of the pool"},
		"a selector":         {gateway + "{nodeSelector: {selector: {matchExpressions: [{key: a, operator: Near}]}}}", `"Near" is not a valid label selector operator`},
		"two defaults":       {gateway + "{clusterDefault: true}\n---\n" + strings.Replace(gateway, "name: g", "name: h", 1) + "{clusterDefault: true}", "EgressGateway h: spec.clusterDefault: EgressGateway g has it, too"},
		"all pods":           {policy + "{appliedTo: {podSelector: {}}}", "f:1: EgressPolicy a/p: spec.appliedTo.podSelector is empty"},
		"no pods":            {policy + "{appliedTo: {}}", "spec.appliedTo has no podSelector"},
		"both sources":       {policy + "{egressIP: {ipv4: 198.51.100.1, useNodeIP: true}, " + selected + "}", "useNodeIP and an address exclude each other"},
		"a destination":      {policy + "{destSubnet: [everything], " + selected + "}", `spec.destSubnet: "everything" isn't a range of addresses in CIDR notation`},
		"a mapped address":   {policy + "{destSubnet: [\"::ffff:203.0.113.1\"], " + selected + "}", `"::ffff:203.0.113.1" isn't a range of addresses`},
		"a source":           {policy + "{egressIP: {ipv6: 198.51.100.1}, " + selected + "}", `"198.51.100.1" isn't an IPv6 address`},
	} {
		t.Run(name, func(t *testing.T) {
			var in Input
			err := in.Read("f", []byte(c.text))
			if err == nil {
				_, err = Convert(in, Options{EgressNamespace: "egress"})
			}
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("it is %v, want %s", err, c.want)
			}
		})
	}
}

// A policy's pods leave in no family that the former system would send past its gateway, and reach what they reached before.
func TestEverything(t *testing.T) {
	but := []netip.Prefix{netip.MustParsePrefix("10.9.0.0/16"), netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("fd00::/8")}
	all := everything(true, true, but)
	for text, want := range map[string]bool{
		"8.8.8.8/32": true, "10.8.255.255/32": true, "10.10.0.0/32": true, "10.9.7.7/32": false, "198.51.100.1/32": false, "198.51.101.1/32": true, "192.168.1.1/32": true,
		"2001:db8::1/128": true, "fd00::1/128": false, "fc00::1/128": true,
	} {
		if got := covered(netip.MustParsePrefix(text), all); got != want {
			t.Errorf("%s is captured: %v, want %v", text, got, want)
		}
	}
	if got := everything(true, false, nil); len(got) != 4 {
		t.Errorf("all of IPv4 is %v", got)
	}
}

// Names of Egresses and AddressPools are valid, and different.
func TestNames(t *testing.T) {
	c := &conversion{names: map[string]bool{}}
	long := strings.Repeat("a", 70)
	seen := map[string]bool{}
	for _, name := range []string{"a.b", "a-b", "9", long, long + "b", "a.b-node", "static-egress-ip", "default", "egress-default"} {
		got := c.rename(name)
		if seen[got] || got == v2.DefaultPool || len(got) > maxName || got[0] < 'a' || got[0] > 'z' || strings.Contains(got, ".") {
			t.Errorf("%s becomes %s", name, got)
		}
		seen[got] = true
	}
}

// JSON has the same objects, with an annotation each, and leaves the objects' own annotations.
func TestJSON(t *testing.T) {
	_, result := converted(t, "testdata/simple.in.yaml")
	text := string(testkit.Must(result.JSON())(t))
	for _, want := range []string{`"kind": "List"`, `"coil.cybozu.com/converted-from": "EgressPolicy shop/checkout (simple.in.yaml:17)"`, `"owner": "ana"`} {
		if !strings.Contains(text, want) {
			t.Errorf("%s isn't in %s", want, text)
		}
	}
	var in Input
	if err := in.Read("again", []byte(text)); err != nil || in.Known() != 0 {
		t.Errorf("objects of Coil are read as those of others: %v, %d", err, in.Known())
	}
}

// Options decide where Egresses are, and what becomes of packets that no router can forward.
func TestOptions(t *testing.T) {
	in := Input{Namespace: "team"}
	testkit.Check(t, in.Read("f", []byte("apiVersion: staticegressips.nirmata.io/v1alpha1\nkind: StaticEgressIP\nmetadata: {name: eip}\nspec: {rules: [{egressip: 198.51.100.1, service-name: web, cidr: 203.0.113.0/24}]}\n")))
	result := testkit.Must(Convert(in, Options{EgressNamespace: "internet", OnFailure: v2.EgressFailureNode}))(t)
	i := slices.IndexFunc(result.Objects, func(o Object) bool { _, ok := o.Object.(*v2.EgressPolicy); return ok })
	if i < 0 {
		t.Fatal("there is no policy")
	}
	got := result.Objects[i].Object.(*v2.EgressPolicy)
	want := v2.EgressPolicySpec{Services: []string{"web"}, EgressUse: v2.EgressUse{
		Egress: &v2.EgressReference{Namespace: "internet", Name: "static-egress-ip"}, Destinations: []string{"203.0.113.0/24"},
		Address: &v2.EgressAddress{IPv4: "198.51.100.1"}, OnFailure: v2.EgressFailureNode,
	}}
	if diff := cmp.Diff(want, got.Spec); diff != "" || got.Namespace != "team" {
		t.Errorf("the policy of namespace %s (-want +got):\n%s", got.Namespace, diff)
	}
}

// FuzzConvert: whatever is read becomes objects that can be written, and whose addresses are those of their pools.
func FuzzConvert(f *testing.F) {
	for _, file := range testkit.Must(filepath.Glob(inputs))(f) {
		f.Add(testkit.Must(os.ReadFile(file))(f))
	}
	f.Add([]byte("---\n...\n--- {}\n--- # x\n{\"kind\":\"List\"}"))
	f.Fuzz(func(t *testing.T, text []byte) {
		var in Input
		if in.Read("f", text) != nil {
			return
		}
		result, err := Convert(in, Options{EgressNamespace: "egress"})
		if err != nil {
			return
		}
		checkAddresses(t, result)
		_, errYAML := result.YAML()
		_, errJSON := result.JSON()
		testkit.Check(t, errors.Join(errYAML, errJSON))
		seen := map[string]bool{}
		for _, o := range result.Objects {
			name := o.GetNamespace() + "/" + o.GetName()
			if name = fmt.Sprintf("%T %s", o.Object, name); seen[name] {
				t.Errorf("%s is there twice", name)
			}
			seen[name] = true
		}
		for l := range strings.Lines(result.Text()) {
			if strings.ContainsAny(strings.TrimSuffix(l, "\n"), "\n\r\x1b") {
				t.Errorf("a note has the line %q", l)
			}
		}
	})
}
