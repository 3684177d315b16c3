package native

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/coil-net/coil/generated/clientset/versioned"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// firstPort is the destination port of the first pod; each pod has one of its own, so that each packet says whose it is, also one without
// payload.
const firstPort = 20000

// slack is for how long the oracle waits with its judgement: programs may learn of a change before the test does.
const slack = 2 * time.Second

// oracle knows by which addresses each pod may leave, from what policies and pods say, and judges packets that are seen outside.
type oracle struct {
	// grace is for how long after a change programs may go by what was before, while nothing disturbs them.
	grace time.Duration

	mu       sync.Mutex
	subjects []*subject
	policies policies
	// past has what the policies were from some times on.
	past []snapshot
	// opened are the connections whose first packet was right: their flows keep the address that they have.
	opened map[connection]bool
	// disturbances are in the order of their beginnings.
	disturbances []*disturbance
	suspects     []suspect
	judged       int
	// violation is the first one.
	violation string
}

type policies map[types.NamespacedName]*v2.EgressPolicy

// snapshot has the policies that there were from a time on.
type snapshot struct {
	at time.Time
	policies
}

// connection is one by TCP as it is seen outside.
type connection struct{ from, to netip.AddrPort }

func connectionOf(p netlab.Packet) connection {
	return connection{netip.AddrPortFrom(p.Src, p.SPort), netip.AddrPortFrom(p.Dst, p.DPort)}
}

// subject is a pod that sends; number is what its port is made of.
type subject struct {
	number int
	name   types.NamespacedName
	labels map[string]string
	worn   []worn       // labels
	addrs  []netip.Addr // its own
	// history has, by server, what was allowed since when.
	history map[netip.Addr][]moment
	// sent are the datagrams to a server that ought to arrive, and arrived those that did, whether they ought to or not.
	sent, arrived map[netip.Addr]int
}

// worn are the labels that a pod has from a time on.
type worn struct {
	at     time.Time
	labels map[string]string
}

// moment is what is allowed from some time on: one source or, if it isn't valid, none.
type moment struct {
	at     time.Time
	source netip.Addr
	why    string
}

// disturbance is a time in which programs may be late.
type disturbance struct {
	what       string
	begin, end time.Time // the latter is zero as long as it lasts
}

// suspect is a packet that wasn't allowed when it came.
type suspect struct {
	packet netlab.Packet
	at     time.Time
	of     *subject
}

func newOracle() *oracle {
	return &oracle{grace: testkit.Timeout(4 * time.Second), policies: policies{}, opened: map[connection]bool{}}
}

// run follows the policies and judges packets until ctx ends.
func (o *oracle) run(ctx context.Context, coil versioned.Interface) {
	go func() {
		for ctx.Err() == nil {
			o.follow(ctx, coil)
		}
	}()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			o.judge(time.Now())
		}
	}
}

// follow reads all policies, and each change until the API server ends that.
func (o *oracle) follow(ctx context.Context, coil versioned.Interface) {
	api := coil.CoilV2().EgressPolicies(metav1.NamespaceAll)
	list, err := api.List(ctx, metav1.ListOptions{})
	if err != nil {
		return
	}
	changes, err := api.Watch(ctx, metav1.ListOptions{ResourceVersion: list.ResourceVersion})
	if err != nil {
		return
	}
	defer changes.Stop()
	o.change(func() {
		clear(o.policies)
		for i := range list.Items {
			o.policies[nameOf(&list.Items[i])] = &list.Items[i]
		}
	})
	for c := range changes.ResultChan() {
		p, ok := c.Object.(*v2.EgressPolicy)
		if !ok {
			return
		}
		o.change(func() {
			if o.policies[nameOf(p)] = p; c.Type == watch.Deleted {
				delete(o.policies, nameOf(p))
			}
		})
	}
}

func nameOf(p metav1.Object) types.NamespacedName {
	return types.NamespacedName{Namespace: p.GetNamespace(), Name: p.GetName()}
}

// change changes what is known, and notes what that allows.
func (o *oracle) change(fn func()) {
	o.mu.Lock()
	defer o.mu.Unlock()
	fn()
	now := time.Now()
	o.past = append(o.past, snapshot{now, maps.Clone(o.policies)})
	for _, s := range o.subjects {
		if n := len(s.worn); n == 0 || !maps.Equal(s.worn[n-1].labels, s.labels) {
			s.worn = append(s.worn, worn{now, s.labels})
		}
		for _, to := range servers {
			source, why := o.policies.allow(s.name.Namespace, s.labels, to)
			if why == noPolicy && len(s.addrs) > 0 {
				source = family(s.addrs, to)
			}
			if h := s.history[to]; len(h) == 0 || h[len(h)-1].source != source || h[len(h)-1].why != why {
				s.history[to] = append(h, moment{now, source, why})
			}
		}
	}
}

// allow is the source with which a pod may send to a server: that of the policy with the smallest destination, of several the oldest, or
// the first by name. Without a policy it is the pod's own, which this doesn't say.
func (all policies) allow(namespace string, pod map[string]string, to netip.Addr) (source netip.Addr, why string) {
	var decides *v2.EgressPolicy
	best := -1
	for _, p := range all {
		if size := chosenBy(p, namespace, pod, to); size > best || size == best && size >= 0 && older(p, decides) {
			decides, best = p, size
		}
	}
	if decides == nil {
		return netip.Addr{}, noPolicy
	}
	if source = addressOf(decides, to); !source.IsValid() {
		return source, "policy " + decides.Name + " without address"
	}
	return source, "policy " + decides.Name
}

// chosenBy is the length of the prefix by which a policy chooses a server for a pod; -1 if it doesn't.
func chosenBy(p *v2.EgressPolicy, namespace string, pod map[string]string, to netip.Addr) (size int) {
	pods, err := metav1.LabelSelectorAsSelector(p.Spec.Pods)
	if err != nil || p.Namespace != namespace || !pods.Matches(labels.Set(pod)) {
		return -1
	}
	if len(p.Spec.Destinations) == 0 {
		return 0
	}
	size = -1
	for _, d := range p.Spec.Destinations {
		if d := netip.MustParsePrefix(string(d)); d.Contains(to) {
			size = max(size, d.Bits())
		}
	}
	return size
}

// addressOf is the address that a policy has in the family of a server; invalid if it has none.
func addressOf(p *v2.EgressPolicy, to netip.Addr) netip.Addr {
	if p.Status.Resolved == nil || p.Status.Resolved.Address == nil {
		return netip.Addr{}
	}
	if a := p.Status.Resolved.Address; to.Is4() {
		return netip.MustParseAddr(a.IPv4)
	}
	return netip.MustParseAddr(p.Status.Resolved.Address.IPv6)
}

const noPolicy = "no policy"

func older(p, than *v2.EgressPolicy) bool {
	if !p.CreationTimestamp.Equal(&than.CreationTimestamp) {
		return p.CreationTimestamp.Before(&than.CreationTimestamp)
	}
	return p.Name < than.Name
}

// disturb notes that programs may be late from now on, until the function is called that it returns.
func (o *oracle) disturb(what string) (end func()) {
	o.mu.Lock()
	defer o.mu.Unlock()
	d := &disturbance{what: what, begin: time.Now()}
	o.disturbances = append(o.disturbances, d)
	return func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		d.end = time.Now()
	}
}

// since is how far back what was allowed may still be in effect at a time: the grace or, if something was disturbed then, the
// grace before that.
func (o *oracle) since(at time.Time) time.Time {
	from := at.Add(-o.grace)
	for _, d := range slices.Backward(o.disturbances) {
		if (d.end.IsZero() || d.end.After(from)) && d.begin.Before(at) && d.begin.Add(-o.grace).Before(from) {
			from = d.begin.Add(-o.grace)
		}
	}
	return from
}

// may says whether a pod may have sent with a source at a time, as far as is known now: by what was allowed within the time that programs may be
// late, or by a policy as it was then for labels that the pod had then, since a program may know of one change before it knows of another.
func (o *oracle) may(s *subject, to, source netip.Addr, at time.Time) bool {
	from, until := o.since(at), at.Add(slack)
	for m := range within(s.history[to], func(m moment) time.Time { return m.at }, from, until) {
		if source.IsValid() && m.source == source {
			return true
		}
	}
	for then := range within(o.past, func(p snapshot) time.Time { return p.at }, from, until) {
		for i, w := range s.worn {
			// A pod had its first labels always, for whoever is late.
			if over := i+1 < len(s.worn) && s.worn[i+1].at.Before(from); over || w.at.After(until) {
				continue
			}
			if by, _ := then.allow(s.name.Namespace, w.labels, to); by.IsValid() && by == source {
				return true
			}
		}
	}
	return false
}

// within yields what was in effect at some time within two times, of what is sorted by when it began.
func within[T any](all []T, began func(T) time.Time, from, until time.Time) iter.Seq[T] {
	return func(yield func(T) bool) {
		for i, x := range slices.Backward(all) {
			over := i+1 < len(all) && began(all[i+1]).Before(from)
			if over || began(x).Before(until) && !yield(x) {
				return
			}
		}
	}
}

// see looks at a packet.
func (o *oracle) see(p netlab.Packet) {
	if !slices.Contains(servers, p.Dst) || p.DPort < firstPort {
		return
	}
	at := time.Now()
	o.mu.Lock()
	defer o.mu.Unlock()
	o.judged++
	n := int(p.DPort) - firstPort
	switch {
	case n >= len(o.subjects):
		o.violate(fmt.Sprintf("%s is of no pod", p))
	case !o.right(p, o.subjects[n], at):
		o.suspects = append(o.suspects, suspect{p, at, o.subjects[n]})
	}
}

// right says whether a packet is, as far as is known now.
func (o *oracle) right(p netlab.Packet, s *subject, at time.Time) bool {
	opens := p.Protocol == unix.IPPROTO_TCP && p.TCPFlags&(syn|ack) == syn
	if !o.may(s, p.Dst, p.Src, at) {
		return p.Protocol == unix.IPPROTO_TCP && !opens && o.opened[connectionOf(p)]
	}
	if opens {
		o.opened[connectionOf(p)] = true
	}
	return true
}

// Flags of TCP.
const syn, ack = 2, 16

// judge judges the suspects that have waited long enough.
func (o *oracle) judge(now time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.suspects = slices.DeleteFunc(o.suspects, func(x suspect) bool {
		if now.Sub(x.at) < slack {
			return false
		}
		if !o.right(x.packet, x.of, x.at) {
			o.violate(o.explain(x))
		}
		return true
	})
}

func (o *oracle) violate(text string) {
	if o.violation == "" {
		o.violation = text
	}
}

// found is the first violation, empty if there is none.
func (o *oracle) found() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.violation
}

// explain says what is wrong with a packet: whose it is, whose its source is, and what was allowed when.
func (o *oracle) explain(x suspect) string {
	var b strings.Builder
	ago := func(t time.Time) string { return fmt.Sprintf("%+.3fs", t.Sub(x.at).Seconds()) }
	fmt.Fprintf(&b, "%s at %s is of pod %s %v %v, which mustn't send so. Allowed to %s, by the time of the packet:", x.packet, x.at.Format(time.StampMilli), x.of.name, x.of.labels, x.of.addrs, x.packet.Dst)
	for _, m := range x.of.history[x.packet.Dst] {
		fmt.Fprintf(&b, "\n  from %s on %v: %s", ago(m.at), m.source, m.why)
	}
	fmt.Fprint(&b, "\nPolicies that chose the pod, with its labels of now:")
	before := ""
	for _, then := range o.past {
		var all []string
		for name, p := range then.policies {
			if size := chosenBy(p, x.of.name.Namespace, x.of.labels, x.packet.Dst); size >= 0 {
				all = append(all, fmt.Sprintf("%s by /%d with %s", name.Name, size, addressOf(p, x.packet.Dst)))
			}
		}
		slices.Sort(all)
		if now := strings.Join(all, ", "); now != before && then.at.After(x.at.Add(-time.Minute)) {
			fmt.Fprintf(&b, "\n  from %s on: %s", ago(then.at), now)
			before = now
		}
	}
	fmt.Fprintf(&b, "\nWhat is allowed counts from %s on. Disturbances:", ago(o.since(x.at)))
	for _, d := range o.disturbances {
		if d.begin.After(x.at.Add(-time.Minute)) {
			fmt.Fprintf(&b, "\n  %s from %s", d.what, ago(d.begin))
			if !d.end.IsZero() {
				fmt.Fprintf(&b, " to %s", ago(d.end))
			}
		}
	}
	fmt.Fprint(&b, "\nPods that have the source, or had it:")
	for _, s := range o.subjects {
		for _, m := range s.history[x.packet.Dst] {
			if m.source == x.packet.Src {
				fmt.Fprintf(&b, "\n  %s from %s on: %s", s.name, ago(m.at), m.why)
			}
		}
	}
	return b.String()
}
