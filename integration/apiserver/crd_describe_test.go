package apiserver

import (
	"bytes"
	"fmt"
	"regexp"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"

	"github.com/coil-net/coil/integration/lab/controlplane"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/testkit"
)

// TestDescribe compares the output of "kubectl describe" with testdata/describe.txt. It describes the first object of each kind, which has an Event.
func TestDescribe(t *testing.T) {
	api := own(t, controlplane.Options{})
	cfg := api.RESTConfig()
	testkit.Check(t, installCRDs(t.Context(), cfg, readCRDs))
	client, core := testkit.Must(dynamic.NewForConfig(cfg))(t), testkit.Must(kubernetes.NewForConfig(cfg))(t)
	recorder, shutdown, err := kube.RunRecorder(t.Context(), core.CoreV1().RESTClient(), "coil-test")
	testkit.Check(t, err)
	defer shutdown()
	var got bytes.Buffer
	for _, table := range tables {
		resource := table.kind.client(client)
		table.kind.create(t, resource, table.objects[0])
		name := table.kind.object(t, table.objects[0]).GetName()
		made := testkit.Must(resource.Get(t.Context(), name, metav1.GetOptions{}))(t)
		for range 3 {
			recorder.Eventf(made, nil, corev1.EventTypeWarning, "Reason", "Reconcile", "What happened to %s, and what to do", name)
		}
		testkit.Eventually(t, 20*time.Second, "the API server has one Event that came three times", func() error {
			l, err := core.CoreV1().Events(metav1.NamespaceDefault).List(t.Context(), metav1.ListOptions{FieldSelector: "involvedObject.uid=" + string(made.GetUID())})
			if err == nil && (len(l.Items) != 1 || l.Items[0].Count != 3) {
				return fmt.Errorf("%d Events: %v", len(l.Items), l.Items)
			}
			return err
		})
		out := testkit.Must(api.Kubectl(t.Context(), "describe", table.kind.resource.Resource+".coil.cybozu.com", name))(t)
		fmt.Fprintf(&got, "# kubectl describe %s %s\n%s\n", table.kind.resource.Resource, name, heads.ReplaceAll(changing.ReplaceAll(out, []byte("$1<changes>")), []byte("$1  ")))
	}
	golden(t, "describe.txt", got.Bytes())
}

var (
	// changing matches values that differ from run to run: metadata, and the ages of an Event.
	changing = regexp.MustCompile(`(?m)((?:^  Creation Timestamp:|^  Resource Version:|^  UID:) +|^  Warning  Reason +)(?:\S+(?: \(x3 over \S+\))?)`)
	// heads are as wide as the age.
	heads = regexp.MustCompile(`(?m)^(  Type     Reason  Age|  ----     ------  ----) +`)
)
