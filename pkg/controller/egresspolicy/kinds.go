package egresspolicy

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/kube/object"
	"github.com/coil-net/coil/pkg/plan/egress"
	"github.com/coil-net/coil/pkg/plan/policy"
	"github.com/coil-net/coil/pkg/syncmap"
)

// apiObject is an object of the API.
type apiObject interface {
	metav1.Object
	runtime.Object
}

// subject is a policy of either kind.
type subject struct {
	policy.Policy
	// invalid is why a selector can't be understood.
	invalid  error
	object   apiObject
	use      v2.EgressUse
	services []string
	status   v2.EgressPolicyStatus
}

func ofPolicy(p *v2.EgressPolicy) *subject {
	made, err := policy.Of(p)
	return &subject{made, err, p, p.Spec.EgressUse, p.Spec.Services, p.Status}
}

func ofClusterPolicy(p *v2.EgressClusterPolicy) *subject {
	made, err := policy.OfCluster(p)
	return &subject{made, err, p, p.Spec.EgressUse, nil, p.Status}
}

func (s *subject) ofCluster() bool { return s.Name.Namespace == "" }

// observed says whether the status is about the present spec.
func (s *subject) observed() bool { return s.status.ObservedGeneration == s.object.GetGeneration() }

// told is the policy as lists tell it: without its address while it isn't in force.
func (s *subject) told() policy.Policy {
	p := s.Policy
	if !policy.InForce(s.status) {
		p.Block = ""
	}
	return p
}

// Keys of indexes beside names: policies without spec.egress, and Egresses with spec.default.
const (
	byDefault = "default"
	isDefault = "default"
)

// usedEgress returns the keys of a policy in the index of users: the Egress that it uses or named, and byDefault.
func usedEgress(use v2.EgressUse, status v2.EgressPolicyStatus) []string {
	keys := sets.New[string]()
	if use.Egress == nil {
		keys.Insert(byDefault)
	} else {
		keys.Insert(use.Egress.Namespace + "/" + use.Egress.Name)
	}
	if r := status.Resolved; r != nil && r.Egress != nil {
		keys.Insert(r.Egress.Namespace + "/" + r.Egress.Name)
	}
	return sets.List(keys)
}

// kinds has the policies of both kinds. They are parsed once.
type kinds struct {
	policies     kube.Cache[v2.EgressPolicy]
	cluster      kube.Cache[v2.EgressClusterPolicy]
	users        kube.Index[v2.EgressPolicy] // by usedEgress
	clusterUsers kube.Index[v2.EgressClusterPolicy]
	selecting    kube.Index[v2.EgressPolicy] // by the Services that they name
	parsed       *syncmap.Map[types.NamespacedName, *subject]
}

func newKinds(cfg Config) kinds {
	k := kinds{
		policies: kube.CacheOf[v2.EgressPolicy](cfg.Policies), cluster: kube.CacheOf[v2.EgressClusterPolicy](cfg.ClusterPolicies),
		parsed: &syncmap.Map[types.NamespacedName, *subject]{},
	}
	k.users = k.policies.IndexBy(func(p *v2.EgressPolicy) []string { return usedEgress(p.Spec.EgressUse, p.Status) })
	k.clusterUsers = k.cluster.IndexBy(func(p *v2.EgressClusterPolicy) []string { return usedEgress(p.Spec.EgressUse, p.Status) })
	k.selecting = k.policies.IndexBy(func(p *v2.EgressPolicy) (keys []string) {
		for _, s := range p.Spec.Services {
			keys = append(keys, p.Namespace+"/"+s)
		}
		return keys
	})
	return k
}

// parse returns what was parsed of the same object before, or parses it. The object of the cache is the same as long as nothing changed.
func parse[T apiObject](k kinds, o T, parse func(T) *subject) *subject {
	key := keyOf(o)
	if s := k.parsed.Get(key); s != nil && s.object == apiObject(o) {
		return s
	}
	s := parse(o)
	k.parsed.Set(key, s)
	return s
}

// find returns the policy of a key, nil if there is none.
func (k kinds) find(key types.NamespacedName) *subject {
	if key.Namespace == "" {
		if p := k.cluster.Find(key.Name); p != nil {
			return parse(k, p, ofClusterPolicy)
		}
	} else if p := k.policies.Find(key.String()); p != nil {
		return parse(k, p, ofPolicy)
	}
	k.parsed.Delete(key)
	return nil
}

// all returns the policies of some objects.
func (k kinds) all(policies []*v2.EgressPolicy, cluster []*v2.EgressClusterPolicy) []*subject {
	all := make([]*subject, 0, len(policies)+len(cluster))
	for _, p := range policies {
		all = append(all, parse(k, p, ofPolicy))
	}
	for _, p := range cluster {
		all = append(all, parse(k, p, ofClusterPolicy))
	}
	return all
}

// beside returns the policies that may select a pod which one selects.
func (k kinds) beside(namespace string) []*subject {
	if namespace == "" {
		return k.all(k.policies.All(), k.cluster.All())
	}
	return k.all(k.policies.In(namespace), k.cluster.All())
}

// using returns the policies under a key of usedEgress.
func (k kinds) using(key string) []*subject {
	return k.all(k.users.Under(key), k.clusterUsers.Under(key))
}

// writeStatus writes the status of a policy, and says whether it did.
func (c *Controller) writeStatus(ctx context.Context, s *subject, status v2.EgressPolicyStatus) (bool, error) {
	o := metav1.UpdateOptions{FieldManager: egress.ControllerName}
	switch p := s.object.(type) {
	case *v2.EgressPolicy:
		p = p.DeepCopy()
		p.Status = status
		return object.WriteStatus(ctx, c.cfg.Coil.CoilV2().EgressPolicies(p.Namespace), p, o)
	case *v2.EgressClusterPolicy:
		p = p.DeepCopy()
		p.Status = status
		return object.WriteStatus(ctx, c.cfg.Coil.CoilV2().EgressClusterPolicies(), p, o)
	}
	return false, nil
}
