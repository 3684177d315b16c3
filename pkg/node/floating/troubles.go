package floating

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	typed "github.com/coil-net/coil/generated/clientset/versioned/typed/coil/v2"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/reconcile"
)

const (
	// lasting is for how long it is told that another host has an address, if that isn't seen again.
	lasting = 5 * time.Minute
	// steady is for how long what is told of one stays as it is: another host may have another address each time.
	steady = time.Minute
)

// TroublesConfig is what Troubles are made of.
type TroublesConfig struct {
	Node   string
	Blocks typed.AddressBlockInterface
	// Block returns a block of a cache, nil if there is none, and All returns all that have floating addresses.
	Block func(name string) *v2.AddressBlock
	All   func() []*v2.AddressBlock
	// Warn records an Event about a block.
	Warn func(b *v2.AddressBlock, reason, message string)
}

// Troubles tells what is wrong with addresses at this node: by conditions of their blocks, Events and a metric.
//
//	condition True    has a line of each node that has seen trouble. That of this node says what is known now, or goes when the trouble has
//	                  ended. With the last line the condition becomes False
//	condition False   becomes True if there is trouble
//
//	Conflicting        has ended some time after it was seen last
//	ForwardingBlocked  has ended when a probe has passed, the address is released, or somebody has taken the condition away. Nothing probes addresses of
//	                   Services: it has ended when their packets pass, or some time after they were seen not to
type Troubles struct {
	cfg  TroublesConfig
	loop *reconcile.Loop[string] // by the name of a block
	// troubled and unheld count addresses.
	troubled, unheld *prometheus.Desc

	mu    sync.Mutex
	known map[trouble]seen
	// passed has the blocks whose packets are known to be forwarded.
	passed map[string]bool
}

// trouble is what is wrong with which block.
type trouble struct{ block, condition string }

// seen is what is known of a trouble.
type seen struct {
	id, message string
	since       time.Time // of the message
	until       time.Time // zero if it doesn't end by itself
	told        bool      // the condition of the block was seen to say so
}

func (s seen) over(now time.Time) bool { return !s.until.IsZero() && !now.Before(s.until) }

// reasons are those of the conditions, and of their Events.
var reasons = map[string]string{v2.BlockConflicting: v2.ReasonOtherHost, v2.BlockForwardingBlocked: v2.ReasonPacketsDropped}

// NewTroubles returns Troubles that tell nothing yet.
func NewTroubles(cfg TroublesConfig, metrics *reconcile.Metrics) *Troubles {
	t := &Troubles{
		cfg: cfg, known: map[trouble]seen{}, passed: map[string]bool{},
		troubled: prometheus.NewDesc("coil_floating_troubled_addresses",
			"Floating addresses of which something is wrong at this node, or was in the last minutes, by the condition of their AddressBlocks that says what.",
			[]string{"condition"}, nil),
		unheld: prometheus.NewDesc("coil_floating_unheld_addresses",
			"Floating addresses that this node may have and that no node has.", nil, nil),
	}
	t.loop = reconcile.New("floating-conditions", t.sync, metrics)
	return t
}

// Run tells until ctx ends.
func (t *Troubles) Run(ctx context.Context) error { return t.loop.Run(ctx, 1) }

// Changed takes a change of a block.
func (t *Troubles) Changed(b *v2.AddressBlock) {
	t.mu.Lock()
	_, blocked := t.known[trouble{b.Name, v2.BlockForwardingBlocked}]
	t.mu.Unlock()
	if blocked || len(b.Status.Conditions) > 0 {
		t.loop.Add(b.Name)
	}
}

// Conflicting notes that another host has an address, and says so for some time.
func (t *Troubles) Conflicting(a Address, message string) {
	t.saw(a, v2.BlockConflicting, message, time.Now().Add(lasting))
}

// Dropped notes that packets of an address aren't forwarded, and says so until they are; of an address of Services, for some time.
func (t *Troubles) Dropped(a Address, message string) {
	var until time.Time
	if a.OfServices {
		until = time.Now().Add(lasting)
	}
	t.saw(a, v2.BlockForwardingBlocked, message, until)
}

func (t *Troubles) saw(a Address, condition, message string, until time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	key, now := trouble{a.Block, condition}, time.Now()
	s, known := t.known[key]
	if !known || s.id != a.ID || s.message != message && now.Sub(s.since) >= steady {
		s = seen{id: a.ID, message: message, since: now}
		t.loop.Add(a.Block)
	}
	s.until = until
	t.known[key] = s
	if condition == v2.BlockForwardingBlocked {
		delete(t.passed, a.Block)
	}
}

// Passed notes that packets of an address are forwarded.
func (t *Troubles) Passed(a Address) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.passed[a.Block] {
		t.loop.Add(a.Block)
	}
	delete(t.known, trouble{a.Block, v2.BlockForwardingBlocked})
	t.passed[a.Block] = true
}

// Blocked returns the addresses whose packets this node drops as far as is known here or from their blocks, whether it has them or not.
func (t *Troubles) Blocked() (all []Address) {
	for _, b := range t.cfg.All() {
		t.mu.Lock()
		_, known := t.known[trouble{b.Name, v2.BlockForwardingBlocked}]
		t.mu.Unlock()
		if !offered(b) || !known && !slices.Contains(plan.ForwardingBlockedAt(b), t.cfg.Node) {
			continue
		}
		if k, err := parse(t.cfg.Node, b); err == nil {
			all = append(all, k.address)
		}
	}
	return all
}

// of returns what is wrong with a block, by condition, and when that is to be looked at again; zero if it needn't be.
func (t *Troubles) of(b string, now time.Time) (wrong map[string]seen, next time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	wrong = map[string]seen{}
	for condition := range reasons {
		key := trouble{b, condition}
		s, ok := t.known[key]
		switch {
		case ok && s.over(now):
			delete(t.known, key)
		case ok:
			wrong[condition] = s
			if left := s.until.Sub(now); !s.until.IsZero() && (next == 0 || left < next) {
				next = left
			}
		}
	}
	return wrong, next
}

// look forgets that packets are dropped if the condition said so, and doesn't any more.
func (t *Troubles) look(b *v2.AddressBlock) {
	t.mu.Lock()
	defer t.mu.Unlock()
	key := trouble{b.Name, v2.BlockForwardingBlocked}
	s, ok := t.known[key]
	switch mine := slices.Contains(plan.ForwardingBlockedAt(b), t.cfg.Node); {
	case !ok:
	case mine && !s.told:
		s.told = true
		t.known[key] = s
	case !mine && s.told:
		delete(t.known, key)
	}
}

// forget forgets what is known of a block that is gone, or whose address is released.
func (t *Troubles) forget(b string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for condition := range reasons {
		delete(t.known, trouble{b, condition})
	}
	delete(t.passed, b)
}

func (t *Troubles) sync(ctx context.Context, name string) error {
	now := time.Now()
	b := t.cfg.Block(name)
	if b == nil || !offered(b) {
		t.forget(name)
	}
	if b == nil {
		return nil
	}
	t.look(b)
	wrong, next := t.of(name, now)
	after, news := t.conditions(b, wrong, metav1.NewTime(now))
	if !equality.Semantic.DeepEqual(b.Status.Conditions, after) {
		if err := PatchConditions(ctx, t.cfg.Blocks, b, after); err != nil {
			return err
		}
	}
	for _, condition := range news {
		t.cfg.Warn(b, condition, wrong[condition].message)
	}
	if next > 0 {
		return reconcile.Later(next)
	}
	return nil
}

// conditions are those that a block is to have, and those that become True, or say something else.
func (t *Troubles) conditions(b *v2.AddressBlock, wrong map[string]seen, now metav1.Time) (after []metav1.Condition, news []string) {
	after = slices.Clone(b.Status.Conditions)
	for _, kind := range []string{v2.BlockConflicting, v2.BlockForwardingBlocked} {
		message := ""
		if c := meta.FindStatusCondition(after, kind); c != nil && c.Status == metav1.ConditionTrue {
			message = c.Message
		}
		c := metav1.Condition{Type: kind, Status: metav1.ConditionTrue, Reason: reasons[kind], LastTransitionTime: now}
		mine := plan.ToldBy(message, t.cfg.Node)
		s, bad := wrong[kind]
		switch {
		case bad && mine == s.message:
			continue
		case bad:
			if c.Message = plan.Told(message, t.cfg.Node, s.message); !plan.Fits(c.Message) {
				continue // too many nodes say so: the metric has this one, too
			}
			news = append(news, kind)
		case mine == "" || !t.ended(b, kind):
			continue
		default:
			c.Message = plan.Told(message, t.cfg.Node, "")
		}
		if c.Message == "" {
			c.Status, c.Reason, c.Message = metav1.ConditionFalse, v2.ReasonOver, plan.AtNode(t.cfg.Node)+"it isn't so any more"
		}
		meta.SetStatusCondition(&after, c)
	}
	return after, news
}

// ended says whether a trouble that isn't known here has ended: an earlier life of this program may have told it.
func (t *Troubles) ended(b *v2.AddressBlock, condition string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return condition != v2.BlockForwardingBlocked || t.passed[b.Name] || !offered(b) || len(b.Floating.Ports) > 0
}

// PatchConditions replaces the conditions of a block, unless it has changed since it was read.
func PatchConditions(ctx context.Context, blocks typed.AddressBlockInterface, b *v2.AddressBlock, conditions []metav1.Condition) error {
	_, err := kube.PatchAsRead(ctx, blocks, b, map[string]any{"status": map[string]any{"conditions": conditions}}, "status")
	return err
}

// Describe implements prometheus.Collector.
func (t *Troubles) Describe(ch chan<- *prometheus.Desc) {
	ch <- t.troubled
	ch <- t.unheld
}

// Collect implements prometheus.Collector.
func (t *Troubles) Collect(ch chan<- prometheus.Metric) {
	count := map[string]int{}
	t.mu.Lock()
	for key, s := range t.known {
		if !s.over(time.Now()) {
			count[key.condition]++
		}
	}
	t.mu.Unlock()
	for condition := range reasons {
		ch <- prometheus.MustNewConstMetric(t.troubled, prometheus.GaugeValue, float64(count[condition]), condition)
	}
	unheld := 0
	for _, b := range t.cfg.All() {
		if b.Floating != nil && b.Floating.Holding.Holder == "" && offered(b) && find(b.Floating.Successors, t.cfg.Node) != nil {
			unheld++
		}
	}
	ch <- prometheus.MustNewConstMetric(t.unheld, prometheus.GaugeValue, float64(unheld))
}
