package ipamcontroller

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

func TestDefaultsAreTheContract(t *testing.T) {
	o := &Options{}
	o.AddFlags(pflag.NewFlagSet("", pflag.ContinueOnError))
	want := &Options{
		MetricsAddr: ":9386", HealthAddr: ":9387", GCInterval: time.Hour, Quarantine: 10 * time.Minute,
		LeaseNamespace: "kube-system", LeaseDuration: 30 * time.Second, RenewDeadline: 20 * time.Second, RetryPeriod: 5 * time.Second,
	}
	if diff := cmp.Diff(want, o); diff != "" {
		t.Errorf("defaults (-want +got):\n%s", diff)
	}
	if err := o.Validate(); err != nil {
		t.Errorf("the defaults are refused: %v", err)
	}
}

func TestValidateNamesAllProblems(t *testing.T) {
	o := &Options{GCInterval: -time.Second, LeaseDuration: time.Second, RenewDeadline: time.Second}
	err := o.Validate()
	if err == nil {
		t.Fatal("nonsense is accepted")
	}
	for _, want := range []string{"--gc-interval", "--quarantine", "--leader-election-retry-period", "--leader-election-namespace", "--leader-election-lease-duration"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error does not name %s: %v", want, err)
		}
	}
}

func TestIdentitiesDiffer(t *testing.T) {
	t.Setenv("COIL_POD_NAME", "pod")
	a, errA := newIdentity()
	b, errB := newIdentity()
	if errA != nil || errB != nil || a == b || !strings.HasPrefix(a, "pod_") {
		t.Errorf("identities are %q (%v) and %q (%v)", a, errA, b, errB)
	}
}

func TestStripNode(t *testing.T) {
	addrs := []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "10.0.0.1"}}
	kept := metav1.ObjectMeta{Name: "n", UID: types.UID("u"), ResourceVersion: "7", CreationTimestamp: metav1.NewTime(time.Unix(1, 0))}
	full := &corev1.Node{ObjectMeta: kept, Status: corev1.NodeStatus{Addresses: addrs, Images: make([]corev1.ContainerImage, 50)}}
	full.Labels = map[string]string{"a": "b"}
	full.ManagedFields = make([]metav1.ManagedFieldsEntry, 3)
	got, err := stripNode(full)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(&corev1.Node{ObjectMeta: kept, Status: corev1.NodeStatus{Addresses: addrs}}, got); diff != "" {
		t.Errorf("what is kept of a Node (-want +got):\n%s", diff)
	}
}
