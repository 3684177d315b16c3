package egress

import (
	"sync"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan/cluster"
)

// expireRanges makes the next use of the cluster's ranges, which change rarely, look at the caches.
func (c *Controller) expireRanges() { c.ranges.Store(new(sync.OnceValue(c.rangesOfCaches))) }

// clusterRanges returns the ranges of the cluster, which must not be changed.
func (c *Controller) clusterRanges() cluster.Ranges { return (*c.ranges.Load())() }

func (c *Controller) rangesOfCaches() cluster.Ranges {
	facts := cluster.Facts{
		Nodes:       kube.CacheOf[corev1.Node](c.cfg.Cluster.Core().V1().Nodes().Informer()).All(),
		Services:    kube.CacheOf[networkingv1.ServiceCIDR](c.cfg.Cluster.Networking().V1().ServiceCIDRs().Informer()).All(),
		ForeignPods: c.cfg.Pools == nil,
		External:    c.cfg.ExternalNodes,
	}
	if c.cfg.Pools != nil {
		facts.Pools = kube.CacheOf[v2.AddressPool](c.cfg.Pools.Informer()).All()
	}
	return cluster.RangesOf(facts)
}
