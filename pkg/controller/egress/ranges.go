package egress

import (
	"sync"

	"k8s.io/apimachinery/pkg/labels"

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
func (r *ranges) get() (cluster.Ranges, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fresh {
		return r.all, nil
	}
	facts := cluster.Facts{ForeignPods: r.cfg.Pools == nil, External: r.cfg.ExternalNodes}
	var err error
	if r.cfg.Pools != nil {
		if facts.Pools, err = r.cfg.Pools.Lister().List(labels.Everything()); err != nil {
			return cluster.Ranges{}, err
		}
	}
	if facts.Nodes, err = r.cfg.Cluster.Core().V1().Nodes().Lister().List(labels.Everything()); err != nil {
		return cluster.Ranges{}, err
	}
	if facts.Services, err = r.cfg.Cluster.Networking().V1().ServiceCIDRs().Lister().List(labels.Everything()); err != nil {
		return cluster.Ranges{}, err
	}
	r.all, r.fresh = cluster.RangesOf(facts), true
	return r.all, nil
}
