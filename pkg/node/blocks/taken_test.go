package blocks

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/coil-net/coil/generated/clientset/versioned/fake"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// foreign returns a BlockRequest that another node made under a name of this one.
func foreign(name string) *v2.BlockRequest {
	return &v2.BlockRequest{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{v2.LabelNode: "other"}},
		Spec:       v2.BlockRequestSpec{NodeName: "other", PoolName: "default"},
	}
}

// ownRequests are the node's requests that the API server has, sorted.
func ownRequests(t *testing.T, client *fake.Clientset) []string {
	t.Helper()
	rs, err := client.CoilV2().BlockRequests().List(t.Context(), metav1.ListOptions{LabelSelector: v2.LabelNode + "=node"})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, r := range rs.Items {
		if r.Spec.NodeName == "node" {
			names = append(names, r.Name)
		}
	}
	slices.Sort(names)
	return names
}

// The token of another node takes the names of this node's next requests: they are nobody's secret.
func TestNamesOfRequestsTakenByAnotherNode(t *testing.T) {
	answered := []v2.BlockRequestCondition{{Type: v2.BlockRequestFailed, Status: corev1.ConditionTrue}}
	for name, conditions := range map[string][]v2.BlockRequestCondition{"open": nil, "answered": answered} {
		t.Run(name, func(t *testing.T) {
			client := fake.NewSimpleClientset()
			for i := range 100 {
				r := foreign(requestName("node", nodeUID, "default", i))
				r.Status.Conditions = conditions
				if err := client.Tracker().Add(r); err != nil {
					t.Fatal(err)
				}
			}
			m := idle(client, cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil))
			for want := 1; want <= 2; want++ {
				if err := m.request(t.Context(), "default"); err != nil {
					t.Fatal(err)
				}
				if got := ownRequests(t, client); len(got) != want {
					t.Fatalf("the node's requests are %q, want %d", got, want)
				}
			}
			creates := 0
			for _, a := range client.Actions() {
				if a.Matches("create", "blockrequests") {
					creates++
				}
			}
			if creates != 3 {
				t.Errorf("%d creates, want one in vain and two", creates)
			}
		})
	}
}

// However many names are taken, the node asks the API server a bounded number of times, and goes on later.
func TestOwnRequestsOfBeforeAreLookedAtInPortions(t *testing.T) {
	client := fake.NewSimpleClientset()
	for i := range 3*maxTaken - 1 {
		r := foreign(requestName("node", nodeUID, "default", i))
		r.Spec.NodeName, r.Status.Conditions = "node", []v2.BlockRequestCondition{{Type: v2.BlockRequestFailed, Status: corev1.ConditionTrue}}
		if err := client.Tracker().Add(r); err != nil {
			t.Fatal(err)
		}
	}
	m := idle(client, cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil))
	for try := 1; try <= 3; try++ {
		client.ClearActions()
		err := m.request(t.Context(), "default")
		if made := err == nil; made != (try == 3) || len(client.Actions()) > 2*maxTaken {
			t.Errorf("try %d: %v, with %d calls", try, err, len(client.Actions()))
		}
	}
	if got := ownRequests(t, client); len(got) != 1 {
		t.Errorf("the node's requests are %q, want one", got)
	}
}

// A block of which pods have addresses is claimed though another node has taken the claim's name, once at a time.
func TestNameOfClaimTakenByAnotherNode(t *testing.T) {
	client := fake.NewSimpleClientset(foreign(claimName("node", nodeUID, "default-0")))
	m := idle(client, cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil))
	m.record.(*record).allocate("default-0", 1)
	synctest.Test(t, func(t *testing.T) {
		var first string
		for try := range 3 {
			usage, _ := m.record.Usage(t.Context())
			if claimed, _, err := m.syncLost(t.Context(), "default", usage); err != nil || !claimed {
				t.Fatalf("claimed: %t, %v", claimed, err)
			}
			got := ownRequests(t, client)
			if len(got) != 1 || first != "" && got[0] != first {
				t.Fatalf("try %d: claims %q, want one", try, got)
			}
			first = got[0]
			r, err := client.CoilV2().BlockRequests().Get(t.Context(), first, metav1.GetOptions{})
			if err != nil || r.Spec.Claim != "default-0" {
				t.Errorf("the claim is %+v, %v", r, err)
			}
			time.Sleep(maxClaimPause) // in the bubble
		}
	})
}
