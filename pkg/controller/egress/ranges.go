package egress

import (
	"sync"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan/cluster"
)

// ranges are those of the cluster, which change rarely.
type ranges struct {
	cfg Config

	mu    sync.Mutex
	fresh bool
	all   cluster.Ranges
}

func newRanges(cfg Config) *ranges { return &ranges{cfg: cfg} }

// expire makes the next get look at the caches.
func (r *ranges) expire() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fresh = false
}

// get returns the ranges, which nobody changes.
func (r *ranges) get() cluster.Ranges {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fresh {
		return r.all
	}
	facts := cluster.Facts{
		Nodes:       kube.CacheOf[corev1.Node](r.cfg.Cluster.Core().V1().Nodes().Informer()).All(),
		Services:    kube.CacheOf[networkingv1.ServiceCIDR](r.cfg.Cluster.Networking().V1().ServiceCIDRs().Informer()).All(),
		ForeignPods: r.cfg.Pools == nil,
		External:    r.cfg.ExternalNodes,
	}
	if r.cfg.Pools != nil {
		facts.Pools = kube.CacheOf[v2.AddressPool](r.cfg.Pools.Informer()).All()
	}
	r.all, r.fresh = cluster.RangesOf(facts), true
	return r.all
}
