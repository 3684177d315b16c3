package why

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/pkg/app/coilctl"
	"github.com/coil-net/coil/pkg/plan/diagnosis"
	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/testkit"
)

// within is how long a walk may take.
const within = 2 * time.Second

// showCoild makes the Pod of the node's coild, which the rig runs without one.
func (f *fixture) showCoild(ready corev1.ConditionStatus) {
	f.t.Helper()
	pods := f.Core.CoreV1().Pods(metav1.NamespaceSystem)
	p, err := pods.Create(f.t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: "coild-" + f.Name, Labels: map[string]string{"app.kubernetes.io/name": "coil", "app.kubernetes.io/component": "coild"},
		},
		Spec: corev1.PodSpec{NodeName: f.Name, HostNetwork: true, Containers: []corev1.Container{{Name: "coild", Image: "none"}}},
	}, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		p, err = pods.Get(f.t.Context(), "coild-"+f.Name, metav1.GetOptions{})
	}
	testkit.Check(f.t, err)
	p.Status.Phase = corev1.PodRunning
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: ready}}
	testkit.Must(pods.UpdateStatus(f.t.Context(), p, metav1.UpdateOptions{}))(f.t)
}

// hideCoild deletes the Pod of the node's coild.
func (f *fixture) hideCoild(ctx context.Context) error {
	return f.Core.CoreV1().Pods(metav1.NamespaceSystem).Delete(ctx, "coild-"+f.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))})
}

// examiner is that of coilctl. There is no kubelet: it asks coild without one.
func (f *fixture) examiner(ahead time.Duration) coilctl.Examiner {
	return coilctl.Examiner{
		Core: f.Core, Coil: f.Coil, Now: func() time.Time { return time.Now().Add(ahead) },
		Ask: func(ctx context.Context, coild *corev1.Pod, words ...string) (*inspection.Answer, error) {
			if coild.Spec.NodeName != f.Name {
				return nil, fmt.Errorf("coild of %s was asked, want that of %s", coild.Spec.NodeName, f.Name)
			}
			return f.Debug(ctx, words...)
		},
	}
}

// walk walks through a pod, ahead of now: for what has lasted too long.
func (f *fixture) walk(namespace, name string, ahead time.Duration) diagnosis.Diagnosis {
	f.t.Helper()
	began := time.Now()
	d := testkit.Must(f.examiner(ahead).Pod(f.t.Context(), namespace, name))(f.t)
	if took := time.Since(began); took > testkit.Limit(within) {
		f.t.Errorf("the walk took %s, more than %s", took, within)
	}
	return d
}

// report tells, as kubelet does, which addresses a pod has.
func (f *fixture) report(s *rig.Sandbox) { f.tell(s, f.Ledger.Live()[s]...) }

// tell tells that a pod has some addresses, in place of others.
func (f *fixture) tell(s *rig.Sandbox, addrs ...netip.Addr) {
	f.t.Helper()
	pods := f.Core.CoreV1().Pods(s.Namespace)
	p := testkit.Must(pods.Get(f.t.Context(), s.Name, metav1.GetOptions{}))(f.t)
	p.Status.Phase, p.Status.PodIP, p.Status.PodIPs = corev1.PodRunning, addrs[0].String(), nil
	for _, a := range addrs {
		p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: a.String()})
	}
	testkit.Must(pods.UpdateStatus(f.t.Context(), p, metav1.UpdateOptions{}))(f.t)
}

// wants checks which steps of a walk are wrong, and what the first of them says.
func wants(t *testing.T, d diagnosis.Diagnosis, wrong string, says ...string) {
	t.Helper()
	if got := strings.Join(d.Wrong(), " "); got != wrong {
		t.Errorf("%s: wrong are %q, want %q:\n%s", d.Subject, got, wrong, text(d))
		return
	}
	for _, s := range d.Steps {
		if s.State != diagnosis.Wrong {
			continue
		}
		for _, said := range says {
			if !strings.Contains(s.Seen+" // "+s.Do, said) {
				t.Errorf("%q isn't said: %s // %s", said, s.Seen, s.Do)
			}
		}
		return
	}
}

func text(d diagnosis.Diagnosis) string {
	var all []string
	for _, s := range d.Steps {
		all = append(all, fmt.Sprintf("%-7s %-9s %s", s.State, s.Step, s.Seen))
	}
	return strings.Join(all, "\n")
}

// healthy checks that nothing is wrong, and nothing unknown but what is named.
func healthy(t *testing.T, d diagnosis.Diagnosis, unknown ...string) {
	t.Helper()
	for _, s := range d.Steps {
		if s.State == diagnosis.Wrong || s.State == diagnosis.Unknown && !slices.Contains(unknown, s.Step) {
			t.Errorf("%s: nothing is wrong, and yet:\n%s", d.Subject, text(d))
			return
		}
	}
}

// awaitHealthy waits until all that was broken is repaired.
func (f *fixture) awaitHealthy(s *rig.Sandbox) {
	f.t.Helper()
	testkit.Eventually(f.t, 10*time.Second, "everything is repaired", func() error {
		d, err := f.examiner(0).Pod(f.t.Context(), s.Namespace, s.Name)
		if wrong := d.Wrong(); err == nil && len(wrong) > 0 {
			err = fmt.Errorf("wrong are %q:\n%s", wrong, text(d))
		}
		return err
	})
}
