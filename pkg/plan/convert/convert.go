// Package convert makes Coil's objects of those of two other egress systems: EgressGateway (egressgateway.spidernet.io) and kube-static-egress-ip
// (staticegressips.nirmata.io).
//
// It owns what their fields mean with Coil, and names each one that means nothing. It must not ask a cluster, nor read files.
package convert

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// Options are what the input doesn't say.
type Options struct {
	// EgressNamespace is the namespace of the Egresses.
	EgressNamespace string
	// OnFailure is that of all policies. Empty: the API's default.
	OnFailure v2.EgressFailure
}

// Origin is where an object of the input is.
type Origin struct {
	Kind, Namespace, Name string
	// File is the name of the input, Line where the object's document begins.
	File string
	Line int
	// Item is the number of the object in a List, from 1; 0 if it isn't in one.
	Item int
}

// Object is the kind and the name.
func (o Origin) Object() string { return strings.TrimSpace(o.Kind + " " + o.name()) }

func (o Origin) name() string {
	if o.Namespace == "" {
		return o.Name
	}
	return o.Namespace + "/" + o.Name
}

// Place is the file and the line.
func (o Origin) Place() string {
	place := fmt.Sprintf("%s:%d", oneLine(o.File), o.Line)
	if o.Item > 0 {
		place += fmt.Sprintf(", item %d", o.Item)
	}
	return place
}

func (o Origin) String() string { return o.Object() + " (" + o.Place() + ")" }

// oneLine is a text that can't end a comment.
func oneLine(s string) string {
	if strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f || r == 0x85 || r == 0x2028 || r == 0x2029 }) {
		return fmt.Sprintf("%q", s)
	}
	return s
}

// Note is what somebody should know about a field.
type Note struct {
	Origin
	Field string
	// Lost says that the field has no counterpart: Coil won't do what it says. Otherwise Coil does it in another way, or there is something left to do.
	Lost bool
	// Why is what is lost or differs, Instead is what to do.
	Why, Instead string
}

// Object is one of Coil's: an AddressPool, an Egress, an EgressPolicy or an EgressClusterPolicy.
type Object struct {
	metav1.Object
	// From are the objects of the input that it was made of.
	From []Origin
}

// Result is what a conversion yields.
type Result struct {
	// Objects are in the order in which they can be created, then by namespace and name.
	Objects []Object
	// Notes are sorted by the objects of the input, in the order of the input.
	Notes []Note
}

// Lost is how many fields have no counterpart.
func (r Result) Lost() (n int) {
	for _, note := range r.Notes {
		if note.Lost {
			n++
		}
	}
	return n
}

// conversion is one under way.
type conversion struct {
	Options
	in          Input
	out         Result
	parsed      []*policy
	names       map[string]bool // of Egresses and AddressPools
	policyNames map[string]bool // "namespace/name"
}

// Convert makes Coil's objects of an input.
func Convert(in Input, o Options) (Result, error) {
	c := &conversion{Options: o, in: in, names: map[string]bool{}, policyNames: map[string]bool{}}
	c.out.Notes = slices.Clone(in.notes)
	if err := c.gateways(); err != nil {
		return Result{}, err
	}
	for _, p := range c.parsed {
		c.policyNames[p.origin.name()] = true
		c.policy(p)
	}
	c.statics()
	slices.SortStableFunc(c.out.Objects, func(a, b Object) int {
		return cmp.Or(rank(a)-rank(b), cmp.Compare(a.GetNamespace(), b.GetNamespace()), cmp.Compare(a.GetName(), b.GetName()))
	})
	slices.SortStableFunc(c.out.Notes, func(a, b Note) int { return in.order[a.Origin] - in.order[b.Origin] })
	return c.out, nil
}

// rank is the place of a kind in the output: what others name comes first.
func rank(o Object) int {
	switch o.Object.(type) {
	case *v2.AddressPool:
		return 0
	case *v2.Egress:
		return 1
	case *v2.EgressClusterPolicy:
		return 2
	}
	return 3
}

func (c *conversion) add(o metav1.Object, from ...Origin) {
	c.out.Objects = append(c.out.Objects, Object{o, from})
}

func (c *conversion) lost(o Origin, field, why, instead string) {
	c.out.Notes = append(c.out.Notes, Note{o, field, true, why, instead})
}

func (c *conversion) note(o Origin, field, why, instead string) {
	c.out.Notes = append(c.out.Notes, Note{o, field, false, why, instead})
}

// ofKind is a kind of Coil's API.
func ofKind(kind string) metav1.TypeMeta {
	return metav1.TypeMeta{APIVersion: v2.GroupVersion.String(), Kind: kind}
}

// metadata is that of an object that is made of another one. Labels and annotations of tools stay behind: these look after the object of before.
func metadata(namespace, name string, from metav1.ObjectMeta) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: ofUsers(from.Labels), Annotations: ofUsers(from.Annotations)}
}

// tools are the domains of labels and annotations by which tools know their objects.
var tools = []string{
	"kubectl.kubernetes.io/", "helm.sh/", "meta.helm.sh/", "argocd.argoproj.io/", "kustomize.toolkit.fluxcd.io/", "helm.toolkit.fluxcd.io/",
	"app.kubernetes.io/managed-by", "spidernet.io/", "config.kubernetes.io/", "kustomize.config.k8s.io/",
}

func ofUsers(all map[string]string) map[string]string {
	var kept map[string]string
	for k, v := range all {
		if slices.ContainsFunc(tools, func(t string) bool { return strings.HasPrefix(k, t) }) {
			continue
		}
		if kept == nil {
			kept = map[string]string{}
		}
		kept[k] = v
	}
	return kept
}

// maxName is how long the name of an Egress or an AddressPool may be.
const maxName = 63

// rename returns a name that an Egress and its AddressPool may have, and that no other one has.
func (c *conversion) rename(name string) string {
	good := strings.ReplaceAll(name, ".", "-")
	// An AddressPool of the name "default" would be that of all pods.
	if good == "" || good[0] < 'a' || good[0] > 'z' || good == v2.DefaultPool {
		good = "egress-" + good
	}
	if len(good) > maxName || c.names[good] {
		good = marked(good, name, maxName)
	}
	c.names[good] = true
	return good
}

// marked cuts a name to a length, with a hash of all of it at the end.
func marked(good, whole string, most int) string {
	mark := fmt.Sprintf("-%x", sha256.Sum256([]byte(whole)))[:9]
	return strings.TrimRight(good[:min(len(good), most-len(mark))], "-.") + mark
}

// prefix reads a range or, if single is set, an address. It says whether host bits were there.
func prefix(text string, single bool) (p netip.Prefix, hostBits bool, err error) {
	if a, err := netip.ParseAddr(text); single && err == nil && a.Zone() == "" && !a.Is4In6() {
		return netip.PrefixFrom(a, a.BitLen()), false, nil
	}
	p, err = netip.ParsePrefix(text)
	if err != nil || p.Addr().Is4In6() {
		return netip.Prefix{}, false, fmt.Errorf("%.100q isn't a range of addresses in CIDR notation", text)
	}
	return p.Masked(), p != p.Masked(), nil
}

// texts are ranges as an API has them.
func texts(all []netip.Prefix) []string {
	var out []string
	for _, p := range all {
		out = append(out, p.String())
	}
	return out
}
