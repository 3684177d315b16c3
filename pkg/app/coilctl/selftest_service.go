package coilctl

import (
	"context"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/health"
	"github.com/coil-net/coil/pkg/plan/preflight"
	"github.com/coil-net/coil/pkg/plan/selftest"
)

// tryService tries whether a Service gets an address, and is reached by it.
func (s *tester) tryService(ctx context.Context, pods []selftest.Pod) error {
	tell := func(state selftest.State, format string, args ...any) error {
		if ctx.Err() == nil {
			s.say(ctx, selftest.Check{Check: selftest.CheckServices, Subject: "the Service", State: state, Seen: fmt.Sprintf(format, args...)})
		}
		return ctx.Err()
	}
	if len(pods) == 0 {
		return ctx.Err()
	}
	l, err := s.core.CoordinationV1().Leases(preflight.Namespace).Get(ctx, plan.LBLease, metav1.GetOptions{})
	wanted := []health.Lease{{Name: plan.LBLease, Controller: "coil-lb-controller"}}
	switch {
	case apierrors.IsNotFound(err):
		return ctx.Err() // it isn't installed
	case err != nil:
		return tell(untried(err), "whether coil-lb-controller runs isn't known: %v", err)
	case l.Spec.HolderIdentity == nil || *l.Spec.HolderIdentity == "" || len(health.Leaders(wanted, []*coordinationv1.Lease{l}, s.now())) > 0:
		return tell(selftest.Skipped, "no coil-lb-controller leads")
	}
	from, endpoint := pods[0], pods[len(pods)-1]
	service, err := s.core.CoreV1().Services(s.template.Namespace).Create(ctx, s.template.ServiceObject(s.servicePool, endpoint.Name), metav1.CreateOptions{})
	if err != nil {
		return tell(untried(err), "it can't be made: %v", err)
	}
	for deadline := time.Now().Add(s.timeout); len(selftest.ServiceAddrs(service)) == 0; {
		if err := pause(ctx, selftestPause); err != nil {
			return err
		}
		late := time.Now().After(deadline)
		latest, err := s.core.CoreV1().Services(s.template.Namespace).Get(ctx, service.Name, metav1.GetOptions{})
		if err != nil && (late || untried(err) == selftest.Skipped) {
			return tell(untried(err), "it can't be read: %v", err)
		} else if err != nil {
			continue // the next look may succeed
		}
		service = latest
		verdict := s.judge.Unassigned(service, s.servicePool)
		if len(selftest.ServiceAddrs(service)) == 0 && (verdict.State == selftest.Skipped || late) {
			s.say(ctx, verdict)
			return ctx.Err()
		}
	}
	served := selftest.Served{From: from, Endpoint: endpoint, Addrs: selftest.ServiceAddrs(service), Port: uint16(s.port)}
	return s.try(ctx, []try{{from: from, questions: served.Questions(), judge: func(answers []selftest.Answer, err error) []selftest.Check {
		served := served
		served.Answers, served.Err = answers, err
		return []selftest.Check{s.judge.Service(served)}
	}}})
}
