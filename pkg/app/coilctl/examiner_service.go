package coilctl

import (
	"context"
	"fmt"
	"strings"
	"sync"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/diagnosis"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/plan/preflight"
)

// mostServices is of how many Services of one address a walk is made.
const mostServices = 16

// Service walks through all that gives a Service of the type LoadBalancer its address, and its traffic.
func (e Examiner) Service(ctx context.Context, namespace, name string) (diagnosis.Diagnosis, error) {
	s, err := e.Core.CoreV1().Services(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return diagnosis.Diagnosis{}, fmt.Errorf("read Service %s/%s: %w", namespace, name, err)
	}
	f := diagnosis.ServiceFacts{Service: s}
	r := e.reading(&f.Facts)
	r.pools(ctx)
	floating := cached()
	floating.LabelSelector = floatingBlocks
	r.do(diagnosis.KindBlocks, func() error {
		l, err := r.Coil.CoilV2().AddressBlocks().List(ctx, floating)
		return listed(&f.Blocks, l, err)
	})
	r.claims(ctx, &f.Claims)
	r.do(diagnosis.KindGateways, func() error {
		l, err := r.Coil.CoilV2().LoadBalancerGateways().List(ctx, cached())
		return listed(&f.Gateways, l, err)
	})
	slices := cached()
	slices.LabelSelector = discoveryv1.LabelServiceName + "=" + name
	r.do(diagnosis.KindSlices, func() error {
		l, err := r.Core.DiscoveryV1().EndpointSlices(namespace).List(ctx, slices)
		return listed(&f.Slices, l, err)
	})
	r.leases(ctx, &f)
	r.wait()

	if node, a := f.Holder(); node != "" {
		r.node(ctx, node, "address", a.String())
	}
	if f.NeedsNodes() {
		r.do(diagnosis.KindNodes, func() error {
			l, err := r.Core.CoreV1().Nodes().List(ctx, cached())
			return listed(&f.Nodes, l, err)
		})
	}
	r.wait()
	return diagnosis.Service(f), nil
}

// claims reads the AddressClaims of Services.
func (r *reading) claims(ctx context.Context, into *[]*v2.AddressClaim) {
	options := cached()
	options.LabelSelector = loadbalancer.LabelClaim + "=true"
	r.do(diagnosis.KindClaims, func() error {
		l, err := r.Coil.CoilV2().AddressClaims(metav1.NamespaceAll).List(ctx, options)
		return listed(into, l, err)
	})
}

// leases reads those of the controllers that Services need.
func (r *reading) leases(ctx context.Context, f *diagnosis.ServiceFacts) {
	r.do(diagnosis.KindLeases, func() error {
		for _, wanted := range diagnosis.LeasesOfServices {
			l, err := found(r.Core.CoordinationV1().Leases(preflight.Namespace).Get(ctx, wanted.Name, metav1.GetOptions{}))
			if err != nil {
				return err
			}
			if l != nil {
				f.Leases = append(f.Leases, l)
			}
		}
		return nil
	})
}

// servicesAt walks through the Services that are reached by the address of a block.
func (e Examiner) servicesAt(ctx context.Context, b *v2.AddressBlock) []diagnosis.Diagnosis {
	all := diagnosis.ServicesAt(b)
	walks := make([]diagnosis.Diagnosis, min(len(all), mostServices))
	var work sync.WaitGroup
	for i := range walks {
		work.Go(func() {
			namespace, name, _ := strings.Cut(all[i], "/")
			d, err := e.Service(ctx, namespace, name)
			if err != nil {
				d = diagnosis.Diagnosis{Subject: "Service " + all[i], Steps: []diagnosis.Step{{Step: diagnosis.StepService, State: diagnosis.Unknown, Seen: err.Error()}}}
			}
			walks[i] = d
		})
	}
	work.Wait()
	return walks
}
