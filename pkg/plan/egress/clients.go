package egress

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/policy"
)

// ControllerName is the name of coil-egress-controller: in labels of the EndpointSlices
// that it manages, and as the manager of fields.
const ControllerName = "coil-egress-controller"

// MaxEndpoints is how many an EndpointSlice may have, and EndpointsPerSlice how many one of
// clients has unless told otherwise: each client that comes or goes writes a slice anew.
const (
	MaxEndpoints      = 1000
	EndpointsPerSlice = 100
)

// Client is an address of a pod that uses an Egress.
type Client struct {
	Pod  types.NamespacedName
	UID  types.UID
	Addr netip.Addr
}

// ClientFacts is all that the clients of an Egress depend on.
type ClientFacts struct {
	Egress *v2.Egress
	// Pods are the pods that name the Egress, or that a policy selects for it.
	Pods []*corev1.Pod
	// Namespaces has the labels of the namespaces of the cluster; one that isn't known
	// has none.
	Namespaces func(name string) labels.Set
}

// Clients returns the clients of an Egress in no order, each address once, and the pods
// that would be clients if their namespaces were allowed. The error says why the selector
// of namespaces can't be used: then none is allowed.
func Clients(f ClientFacts) (clients []Client, refused []*corev1.Pod, err error) {
	allowed, err := plan.AllowedNamespaces(f.Egress)
	holder := make(map[netip.Addr]*corev1.Pod, len(f.Pods))
	for _, p := range f.Pods {
		if !MayBeClient(p) {
			continue
		}
		if !allowed.Empty() && !allowed.Matches(f.Namespaces(p.Namespace)) {
			refused = append(refused, p)
			continue
		}
		for _, ip := range p.Status.PodIPs {
			a, err := netip.ParseAddr(ip.IP)
			// The API server refuses a whole EndpointSlice for one address of these.
			if err != nil || !a.IsGlobalUnicast() {
				continue
			}
			if a = a.Unmap(); holder[a] == nil || compareHolders(p, holder[a]) < 0 {
				holder[a] = p
			}
		}
	}
	clients = make([]Client, 0, len(holder))
	for a, p := range holder {
		clients = append(clients, Client{Pod: types.NamespacedName{Namespace: p.Namespace, Name: p.Name}, UID: p.UID, Addr: a})
	}
	return clients, refused, err
}

// MayBeClient says whether a pod has a network of its own, and hasn't ended.
func MayBeClient(p *corev1.Pod) bool {
	return !p.Spec.HostNetwork && p.Status.Phase != corev1.PodSucceeded && p.Status.Phase != corev1.PodFailed
}

// compareHolders orders pods that have the same address: the first is the one that lives.
func compareHolders(a, b *corev1.Pod) int {
	return cmp.Or(
		plan.TrueFirst(a.DeletionTimestamp == nil, b.DeletionTimestamp == nil),
		b.CreationTimestamp.Compare(a.CreationTimestamp.Time), // an address is reused by a younger pod
		cmp.Compare(a.UID, b.UID),
	)
}

func compareClients(a, b Client) int {
	return cmp.Or(strings.Compare(a.Pod.Namespace, b.Pod.Namespace), strings.Compare(a.Pod.Name, b.Pod.Name), a.Addr.Compare(b.Addr))
}

// List is a list of clients of an Egress, which is in EndpointSlices.
type List struct {
	// Egress is the Egress, and Label the label of the slices with its name.
	Egress types.NamespacedName
	Label  string
	// Prefix begins the names of the slices.
	Prefix      string
	Annotations map[string]string
	Owner       metav1.OwnerReference
}

// ListOf returns the list of the clients that name an Egress by their annotations.
func ListOf(e *v2.Egress) List {
	l := List{Egress: types.NamespacedName{Namespace: e.Namespace, Name: e.Name}, Label: v2.LabelEgress, Prefix: e.Name + "-clients", Owner: controlledBy(e)}
	l.leaveBy(plan.AddressOf(e, ""))
	return l
}

// leaveBy says by which floating address the clients leave; nil says nothing.
func (l *List) leaveBy(a *v2.EgressAddressStatus) {
	if a == nil {
		return
	}
	if l.Annotations == nil {
		l.Annotations = map[string]string{}
	}
	l.Annotations[v2.AnnotationAddress] = strings.Trim(a.IPv4+","+a.IPv6, ",")
}

// Of names of an Egress and of a policy the names of slices have the first maxPart bytes, so that they have 63 at most.
const maxPart = 20

// PolicyListOf returns the list of the clients that use an Egress by a policy.
func PolicyListOf(e *v2.Egress, p policy.Policy) List {
	l := List{
		Egress: types.NamespacedName{Namespace: e.Namespace, Name: e.Name}, Label: v2.LabelPolicyEgress, Owner: controlledBy(e),
		Annotations: map[string]string{v2.AnnotationPolicy: policy.OriginOf(p).String()},
	}
	sum := sha256.Sum256([]byte(l.Egress.String() + "\n" + p.Name.String()))
	part := func(name string) string { return strings.ReplaceAll(name[:min(len(name), maxPart)], ".", "-") }
	if p.Block != "" {
		l.leaveBy(plan.AddressOf(e, p.Block))
	}
	l.Prefix = part(e.Name) + "-" + part(p.Name.Name) + "-" + hex.EncodeToString(sum[:5])
	return l
}

// has says whether a slice is one of the list, and not of another one of the same policy, which named another Egress.
func (l List) has(s *discoveryv1.EndpointSlice) bool {
	return s.Namespace == l.Egress.Namespace && s.Labels[l.Label] == l.Egress.Name
}

// EgressOfPolicySlice returns the Egress by which the clients in a slice of a policy leave.
func EgressOfPolicySlice(s *discoveryv1.EndpointSlice) types.NamespacedName {
	return types.NamespacedName{Namespace: s.Namespace, Name: s.Labels[v2.LabelPolicyEgress]}
}

// Clients returns the clients that slices of the list have, by their addresses. Slices of other lists don't count.
func (l List) Clients(have []*discoveryv1.EndpointSlice) map[netip.Addr]Client {
	all := map[netip.Addr]Client{}
	for _, s := range have {
		if !l.has(s) {
			continue
		}
		for _, ep := range s.Endpoints {
			if c, ok := clientOf(ep); ok {
				all[c.Addr] = c
			}
		}
	}
	return all
}

// tells says whether the annotations of a slice say of its clients what the list says.
func (l List) tells(annotations map[string]string) bool {
	return annotations[v2.AnnotationPolicy] == l.Annotations[v2.AnnotationPolicy] && annotations[v2.AnnotationAddress] == l.Annotations[v2.AnnotationAddress]
}

// Telling returns those of some slices that say of their clients what the list says.
func (l List) Telling(have []*discoveryv1.EndpointSlice) (telling []*discoveryv1.EndpointSlice) {
	for _, s := range have {
		if l.tells(s.Annotations) {
			telling = append(telling, s)
		}
	}
	return telling
}

// SliceChanges are writes that make the EndpointSlices of a list what they should be.
type SliceChanges struct {
	Create, Update, Delete []*discoveryv1.EndpointSlice
}

// ClientSelector selects, as text, the EndpointSlices with clients.
func ClientSelector() string {
	return labels.Set{discoveryv1.LabelManagedBy: ControllerName}.String()
}

// Empty says whether there is nothing to write.
func (c SliceChanges) Empty() bool { return len(c.Create)+len(c.Update)+len(c.Delete) == 0 }

// Listed is a list with the clients that it is to have.
type Listed struct {
	List
	Want []Client
}

// With returns the list with clients.
func (l List) With(want []Client) Listed { return Listed{l, want} }

// ClientSlices returns the fewest writes after which slices have the clients of some lists, about limit in each.
// Slices of other lists are deleted. A client stays in the slice where it is, and
// one that comes takes a place in a slice that is written anyway, else in the fullest that has
// one. Slices that have more than the limit are relieved bit by bit. The given objects are
// not changed.
func ClientSlices(have []*discoveryv1.EndpointSlice, limit int, lists ...Listed) SliceChanges {
	// Of a client that two slices have, the copy in the smaller one stays.
	have = slices.SortedFunc(slices.Values(have), func(a, b *discoveryv1.EndpointSlice) int {
		return cmp.Or(cmp.Compare(max(limit, len(a.Endpoints)), max(limit, len(b.Endpoints))), strings.Compare(a.Name, b.Name))
	})
	var out SliceChanges
	for _, l := range lists {
		var mine []*discoveryv1.EndpointSlice
		have = slices.DeleteFunc(have, func(s *discoveryv1.EndpointSlice) bool {
			if l.has(s) {
				mine = append(mine, s)
				return true
			}
			return false
		})
		for _, family := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6} {
			placeClients(&out, l, family, mine, limit)
		}
	}
	out.Delete = append(out.Delete, have...)
	return out
}

// draft is a slice that is being filled.
type draft struct {
	slice   *discoveryv1.EndpointSlice
	before  *discoveryv1.EndpointSlice // nil for a new one
	changed bool
}

func placeClients(out *SliceChanges, l Listed, family discoveryv1.AddressType, have []*discoveryv1.EndpointSlice, limit int) {
	missing := make(map[netip.Addr]Client, len(l.Want))
	for _, c := range l.Want {
		if c.Addr.Is4() == (family == discoveryv1.AddressTypeIPv4) {
			missing[c.Addr] = c
		}
	}
	var drafts []*draft
	taken := map[string]bool{}
	for _, s := range have {
		taken[s.Name] = true
		if s.AddressType == family {
			drafts = append(drafts, newDraft(l.List, s, missing))
		}
	}
	slices.SortFunc(drafts, func(a, b *draft) int {
		return cmp.Or(plan.TrueFirst(a.changed, b.changed),
			cmp.Compare(len(b.slice.Endpoints), len(a.slice.Endpoints)), strings.Compare(a.slice.Name, b.slice.Name))
	})
	next := 0
	place := func(ep discoveryv1.Endpoint) {
		for next < len(drafts) && len(drafts[next].slice.Endpoints) >= limit {
			next++
		}
		if next == len(drafts) {
			s := emptySlice(l.List, family, freeName(l.Prefix, family, taken))
			taken[s.Name] = true
			drafts = append(drafts, &draft{slice: s})
		}
		d := drafts[next]
		d.slice.Endpoints = append(d.slice.Endpoints, ep)
		d.changed = true
	}
	for _, c := range slices.SortedFunc(maps.Values(missing), compareClients) {
		place(endpoint(c))
	}
	for _, ep := range surplus(drafts, limit) {
		place(ep)
	}
	for _, d := range drafts {
		switch {
		case d.before == nil:
			out.Create = append(out.Create, d.slice)
		case len(d.slice.Endpoints) == 0:
			out.Delete = append(out.Delete, d.before)
		case d.changed:
			out.Update = append(out.Update, d.slice)
		}
	}
}

// surplus returns clients of a slice that has more than the limit, no more than fit into
// another one. They are copied, so that none is missing in between: once another slice has
// them newDraft takes them off.
func surplus(drafts []*draft, limit int) []discoveryv1.Endpoint {
	for _, d := range drafts {
		if n := len(d.slice.Endpoints); n > limit {
			return slices.Clone(d.slice.Endpoints[max(limit, n-limit):])
		}
	}
	return nil
}

// newDraft keeps of a slice the clients that are wanted, and takes them off missing.
func newDraft(l List, s *discoveryv1.EndpointSlice, missing map[netip.Addr]Client) *draft {
	d := &draft{before: s, slice: emptySlice(l, s.AddressType, s.Name)}
	d.slice.Endpoints = make([]discoveryv1.Endpoint, 0, len(s.Endpoints)+1)
	d.slice.UID, d.slice.ResourceVersion = s.UID, s.ResourceVersion
	for _, ep := range s.Endpoints {
		c, ok := clientOf(ep)
		if wanted := missing[c.Addr]; !ok || wanted != c || len(d.slice.Endpoints) == MaxEndpoints {
			d.changed = true
			continue
		}
		delete(missing, c.Addr)
		d.slice.Endpoints = append(d.slice.Endpoints, ep)
	}
	// kube-proxy takes a slice for a Service's by this label.
	_, ofService := s.Labels[discoveryv1.LabelServiceName]
	if ofService || len(s.Ports) > 0 || !equality.Semantic.DeepEqual(s.OwnerReferences, d.slice.OwnerReferences) ||
		!labels.SelectorFromSet(d.slice.Labels).Matches(labels.Set(s.Labels)) || !l.tells(s.Annotations) {
		d.changed = true
	}
	return d
}

// clientOf is the reverse of endpoint; false for an Endpoint that endpoint doesn't make.
func clientOf(ep discoveryv1.Endpoint) (Client, bool) {
	if ep.TargetRef == nil || len(ep.Addresses) != 1 {
		return Client{}, false
	}
	a, err := netip.ParseAddr(ep.Addresses[0])
	c := Client{
		Pod: types.NamespacedName{Namespace: ep.TargetRef.Namespace, Name: ep.TargetRef.Name}, UID: ep.TargetRef.UID, Addr: a,
	}
	// Field by field: reflection would take most of the time for thousands of clients.
	plain := ep.Hostname == nil && ep.NodeName == nil && ep.Zone == nil && ep.Hints == nil && len(ep.DeprecatedTopology) == 0
	ready := ep.Conditions.Ready != nil && *ep.Conditions.Ready && ep.Conditions.Serving == nil && ep.Conditions.Terminating == nil
	return c, err == nil && plain && ready && *ep.TargetRef == podRef(c) && ep.Addresses[0] == a.String()
}

func endpoint(c Client) discoveryv1.Endpoint {
	return discoveryv1.Endpoint{
		Addresses:  []string{c.Addr.String()},
		Conditions: discoveryv1.EndpointConditions{Ready: new(true)},
		TargetRef:  new(podRef(c)),
	}
}

func podRef(c Client) corev1.ObjectReference {
	return corev1.ObjectReference{Kind: "Pod", Namespace: c.Pod.Namespace, Name: c.Pod.Name, UID: c.UID}
}

func emptySlice(l List, family discoveryv1.AddressType, name string) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: l.Egress.Namespace, Name: name, Annotations: l.Annotations,
			Labels: map[string]string{
				l.Label:                    l.Egress.Name,
				discoveryv1.LabelManagedBy: ControllerName,
				corev1.IsHeadlessService:   "", // kube-proxy leaves it alone
			},
			OwnerReferences: []metav1.OwnerReference{l.Owner},
		},
		AddressType: family,
	}
}

// freeName is the first name of a slice that isn't taken.
func freeName(prefix string, family discoveryv1.AddressType, taken map[string]bool) string {
	for i := 0; ; i++ {
		name := prefix + "-" + strings.ToLower(string(family)) + "-" + strconv.Itoa(i)
		if !taken[name] {
			return name
		}
	}
}

// CountClients returns how many pods slices have.
func CountClients(have []*discoveryv1.EndpointSlice) int {
	pods := map[types.UID]bool{}
	for _, s := range have {
		for _, ep := range s.Endpoints {
			if ep.TargetRef != nil {
				pods[ep.TargetRef.UID] = true
			}
		}
	}
	return len(pods)
}
