package monitoring

import (
	"net/netip"
	"regexp"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/informers"
	kubefake "k8s.io/client-go/kubernetes/fake"
	metadatafake "k8s.io/client-go/metadata/fake"
	"k8s.io/client-go/tools/cache"

	coilfake "github.com/coil-net/coil/generated/clientset/versioned/fake"
	"github.com/coil-net/coil/generated/informers/externalversions"
	"github.com/coil-net/coil/pkg/controller/blockrequest"
	"github.com/coil-net/coil/pkg/controller/egress"
	claims "github.com/coil-net/coil/pkg/controller/floating"
	"github.com/coil-net/coil/pkg/controller/loadbalancer"
	"github.com/coil-net/coil/pkg/controller/pool"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/lbgateway"
	"github.com/coil-net/coil/pkg/natgateway"
	"github.com/coil-net/coil/pkg/node/announce"
	"github.com/coil-net/coil/pkg/node/floating"
	"github.com/coil-net/coil/pkg/node/floating/place"
	"github.com/coil-net/coil/pkg/node/floating/standby"
	"github.com/coil-net/coil/pkg/observe"
	"github.com/coil-net/coil/pkg/plan/gateway"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/router"
	"github.com/coil-net/coil/pkg/testkit"
)

// register registers metrics as programs do. All whose names or labels are put together while a program runs are here; those of which
// the sources tell both needn't be.
func register(t *testing.T, r *prometheus.Registry) {
	t.Helper()
	core, coil := kubefake.NewClientset(), coilfake.NewSimpleClientset()
	all, own := informers.NewSharedInformerFactory(core, 0), externalversions.NewSharedInformerFactory(coil, 0).Coil().V2()
	namespaces := kube.MetadataInformer(metadatafake.NewSimpleMetadataClient(metadatafake.NewTestScheme()), corev1.SchemeGroupVersion.WithResource("namespaces"), "")
	nodes := all.Core().V1().Nodes()
	loops := reconcile.NewMetrics(r)
	reconcile.NewRepairs(r, nil)

	carver := testkit.Must(blockrequest.New(blockrequest.Config{
		Coil: coil, Core: core, Requests: own.BlockRequests(), Blocks: own.AddressBlocks(), Pools: own.AddressPools(), Nodes: nodes, Registry: r,
	}))(t)
	testkit.Must(pool.New(pool.Config{
		Coil: coil, Pools: own.AddressPools(), Blocks: own.AddressBlocks(), Nodes: nodes,
		Services: all.Networking().V1().ServiceCIDRs(), Carver: carver, LoopMetrics: loops, Registry: r,
	}))(t)
	testkit.Must(egress.New(egress.Config{
		Coil: coil, Core: core, Egresses: own.Egresses(), Cluster: all, Namespaces: namespaces, Routers: all, Accounts: all, Clients: all,
		LoopMetrics: loops, Registry: r,
	}))(t)
	testkit.Must(claims.New(claims.Config{
		Coil: coil, Core: core, Claims: own.AddressClaims(), Blocks: own.AddressBlocks(), Pools: own.AddressPools(), LoopMetrics: loops, Registry: r,
	}))(t)
	testkit.Must(loadbalancer.New(loadbalancer.Config{
		Coil: coil, Core: core, Pools: own.AddressPools(), Claims: own.AddressClaims(), Gateways: own.LoadBalancerGateways(),
		Blocks: own.AddressBlocks().Informer(), Cluster: all, LoopMetrics: loops, Registry: r,
	}))(t)

	testkit.Must(lbgateway.New(t.Context(), lbgateway.Config{
		Gateways: own.LoadBalancerGateways().Informer(), Pools: own.AddressPools().Informer(), Blocks: own.AddressBlocks().Informer(),
		Services: all.Core().V1().Services().Informer(), Slices: all.Discovery().V1().EndpointSlices().Informer(), Nodes: nodes.Informer(),
		LoopMetrics: loops, Registry: r,
	}))(t)
	ofRouter := natgateway.Config{Namespace: "n", Egress: "e", Config: gateway.Config{Pod: "p", Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1")}}}
	r.MustRegister(natgateway.NewCollector(t.Context(), ofRouter, nil, nil, nil))
	// These have loops of their own, whose metrics are registered already.
	apart := prometheus.NewRegistry()
	testkit.Must(natgateway.New(ofRouter, natgateway.Kernel{}, own.Egresses().Informer(),
		[]cache.SharedIndexInformer{all.Discovery().V1().EndpointSlices().Informer()}, only{r, apart}, nil))(t)
	apart = prometheus.NewRegistry()
	testkit.Must(router.New(router.Config{NodeName: "n"}, nodes.Informer(), own.AddressBlocks().Informer(), nil, only{r, apart}, nil))(t)

	r.MustRegister(announce.New(announce.Config{}), place.NewTraffic(t.Context(), place.Tables{}), floating.NewTroubles(floating.TroublesConfig{}, nil))
	floating.New(floating.Config{}, r)
	standby.New(t.Context(), standby.Config{}, r)
}

// only registers what isn't registered yet.
type only struct {
	prometheus.Registerer
	// seen takes what is.
	seen prometheus.Registerer
}

// MustRegister implements prometheus.Registerer.
func (o only) MustRegister(all ...prometheus.Collector) {
	for _, c := range all {
		if o.Register(c) != nil {
			o.seen.MustRegister(c)
		}
	}
}

// Desc{fqName: "name", help: "...", constLabels: {a="b"}, variableLabels: {c,d}}
var description = regexp.MustCompile(`fqName: "(\w+)".* constLabels: \{(.*)\}, variableLabels: \{(.*)\}`)

// described returns the metrics of registries with their labels, which are told also while there is no sample.
func described(t *testing.T, registries ...*prometheus.Registry) map[string][]string {
	t.Helper()
	all := make(chan *prometheus.Desc)
	go func() {
		defer close(all)
		for _, r := range registries {
			r.Describe(all)
		}
	}()
	found := map[string][]string{}
	for d := range all {
		parts := description.FindStringSubmatch(d.String())
		if parts == nil {
			t.Fatalf("%s can't be read", d)
		}
		labels := regexp.MustCompile(`\w+`).FindAllString(parts[3], -1)
		for _, c := range regexp.MustCompile(`(\w+)=`).FindAllStringSubmatch(parts[2], -1) {
			labels = append(labels, c[1])
		}
		found[parts[1]] = labels
	}
	return found
}

// registered returns what register registers, and what any program exports about itself.
func registered(t *testing.T) map[string][]string {
	t.Helper()
	r := prometheus.NewRegistry()
	register(t, r)
	return described(t, r, observe.NewRegistry())
}
