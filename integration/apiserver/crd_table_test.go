package apiserver

import (
	"bytes"
	"flag"
	"fmt"
	"github.com/coil-net/coil/pkg/testkit"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"text/tabwriter"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/coil-net/coil/integration/lab/controlplane"
)

var update = flag.Bool("update", false, "write what the tests see to testdata")

// tables are the objects whose columns "kubectl get" shows; each has a status.
var tables = []struct {
	kind    kind
	objects []string
}{
	{poolKind, []string{`
metadata: {name: default}
spec: {subnets: [{ipv4: 10.0.0.0/16, ipv6: "fd00::/112"}, {ipv4: 10.1.0.0/16, ipv6: "fd00::1:0/112"}]}
status:
  blocks: {used: 3, total: 4096, summary: 3/4096}
  addresses: {used: 71, total: 131072, summary: 71/131072}
  conditions:
  - {type: Exhausted, status: "False", reason: BlocksAvailable, message: "", lastTransitionTime: "2026-01-01T00:00:00Z"}
  - {type: Overlapping, status: "False", reason: NoOverlap, message: "", lastTransitionTime: "2026-01-01T00:00:00Z"}
`, `
metadata: {name: old}
spec: {announce: Neighbor, blockSizeBits: 0, subnets: [{ipv4: 192.0.2.0/31}]}
status:
  blocks: {used: 2, total: 2, summary: 2/2}
  addresses: {used: 1, total: 2, summary: 1/2}
  floating: {used: 1, cooling: 0}
  conditions:
  - {type: Exhausted, status: "True", reason: AllBlocksTaken, message: "", lastTransitionTime: "2026-01-01T00:00:00Z"}
  - {type: Overlapping, status: "True", reason: AddressesUsedByOthers, message: "", lastTransitionTime: "2026-01-01T00:00:00Z"}
  - {type: Terminating, status: "True", reason: BlocksInUse, message: "2 blocks on 1 node", lastTransitionTime: "2026-01-01T00:00:00Z"}
  - {type: Drained, status: "False", reason: BlocksInUse, message: 2 blocks are held, lastTransitionTime: "2026-01-01T00:00:00Z"}
`, `
metadata: {name: unseen}
spec: {subnets: [{ipv6: "fd00:2::/112"}]}
`}},
	{blockKind, []string{`
metadata: {name: default-0, labels: {coil.cybozu.com/pool: default, coil.cybozu.com/node: worker}}
index: 0
ipv4: 10.0.0.0/27
ipv6: "fd00::/123"
status: {allocated: 30, cooling: 2}
`, `
metadata: {name: v1-9, labels: {coil.cybozu.com/pool: v1, coil.cybozu.com/node: worker2, coil.cybozu.com/reserved: "true"}}
index: 9
ipv4: 10.9.0.0/32
`, `
metadata: {name: partners-7, labels: {coil.cybozu.com/pool: partners, coil.cybozu.com/reserved: "true", coil.cybozu.com/floating: "true"}}
index: 7
ipv4: 198.51.100.7/32
floating:
  claim: nat
  coolDownSeconds: 3600
  owner: {kind: Egress, namespace: internet, name: nat, uid: "1", summary: Egress internet/nat}
  holding: {holder: worker, epoch: 3, since: "2026-01-01T00:00:00Z"}
`}},
	{claimKind, []string{`
metadata: {name: nat, namespace: default}
spec: {pool: partners, count: 2}
status:
  summary: 1/2
  addresses: [{block: partners-7, ipv4: 198.51.100.7}]
  conditions:
  - {type: Ready, status: "False", reason: PoolExhausted, message: AddressPool partners has no address left, lastTransitionTime: "2026-01-01T00:00:00Z"}
`, `
metadata: {name: unseen, namespace: default}
spec: {pool: partners, addresses: [198.51.100.9]}
`}},
	{requestKind, []string{`
metadata: {name: answered}
spec: {nodeName: worker, poolName: default}
status:
  addressBlockName: default-0
  conditions: [{type: Complete, status: "True", reason: BlockAssigned, message: ""}]
`, `
metadata: {name: refused}
spec: {nodeName: worker, poolName: old}
status:
  conditions: [{type: Failed, status: "True", reason: PoolExhausted, message: every block of the pool is taken}]
`, `
metadata: {name: waiting}
spec: {nodeName: worker2, poolName: default}
`}},
	{egressKind, []string{`
metadata: {name: internet}
spec: {replicas: 3, destinations: [0.0.0.0/0, "::/0"]}
status:
  replicas: 3
  selector: app.kubernetes.io/instance=internet
  clients: 12
  conditions:
  - {type: Available, status: "True", reason: RoutersReady, message: "", lastTransitionTime: "2026-01-01T00:00:00Z"}
  - {type: AddressesReady, status: "True", reason: AddressesHeld, message: "", lastTransitionTime: "2026-01-01T00:00:00Z"}
`, `
metadata: {name: unseen}
spec: {destinations: [192.0.2.0/24]}
`}},
	{policyKind, []string{`
metadata: {name: shop, namespace: default}
spec: {egress: {namespace: internet, name: nat}, pods: {matchLabels: {app: shop}}}
status:
  summary: {egress: internet/nat, address: 198.51.100.3 and 2001:db8::3}
  node: worker
  router: nat-1
  since: "2026-01-01T00:00:00Z"
  clients: 12
  conditions: [{type: Accepted, status: "True", reason: Accepted, message: "", lastTransitionTime: "2026-01-01T00:00:00Z"}]
`, `
metadata: {name: typo, namespace: default}
spec: {services: [fronted]}
status:
  summary: {egress: internet/nat}
  conditions: [{type: Accepted, status: "False", reason: ServiceNotFound, message: "", lastTransitionTime: "2026-01-01T00:00:00Z"}]
`, `
metadata: {name: unseen, namespace: default}
spec: {podCIDRs: [10.1.0.0/16]}
`}},
	{clusterPolicyKind, []string{`
metadata: {name: all}
spec: {namespaceSelector: {}, pods: {}}
status:
  summary: {egress: internet/nat, address: 198.51.100.4}
  node: worker2
  clients: 1200
  conditions: [{type: Accepted, status: "True", reason: Accepted, message: "", lastTransitionTime: "2026-01-01T00:00:00Z"}]
`, `
metadata: {name: unseen}
spec: {namespaceSelector: {}, podCIDRs: [10.1.0.0/16]}
`}},
	{gatewayKind, []string{`
metadata: {name: gw-1}
spec: {pools: [public], vrrp: {interface: eth0, sources: [192.0.2.11]}}
status:
  applied: {generation: 1, blocks: "4711", services: 2, ports: 3, endpoints: 9, hash: 5e884898}
  vrrp: [{routerID: 51, family: IPv4, state: MASTER, priority: 200, addresses: 2}]
  errors: [{service: shop/web, message: "port 80/SCTP: the kernel has no SCTP"}]
  lastContact: "2026-01-01T00:00:00Z"
  conditions: [{type: Applied, status: "False", reason: ServiceErrors, message: "shop/web: port 80/SCTP: the kernel has no SCTP", lastTransitionTime: "2026-01-01T00:00:00Z"}]
`, `
metadata: {name: unseen}
spec: {pools: [public], endpoints: Pod, masquerade: Never}
`}},
}

// TestColumns compares the columns that kubectl shows with testdata/get.txt; the
// narrow table is that of "kubectl get", the wide one that of "-o wide".
func TestColumns(t *testing.T) {
	cfg := own(t, controlplane.Options{}).RESTConfig()
	if err := installCRDs(t.Context(), cfg, readCRDs); err != nil {
		t.Fatal(err)
	}
	client := testkit.Must(dynamic.NewForConfig(cfg))(t)
	var got bytes.Buffer
	for _, table := range tables {
		for _, text := range table.objects {
			table.kind.create(t, table.kind.client(client), text)
		}
		tab := getTable(t, cfg, "/apis/coil.cybozu.com/v2/"+table.kind.resource.Resource)
		for _, wide := range []bool{false, true} {
			printTable(t, &got, tab, wide)
		}
	}
	golden(t, "get.txt", got.Bytes())
}

// create makes an object with its status.
func (k kind) create(t *testing.T, client dynamic.ResourceInterface, text string) {
	t.Helper()
	obj := k.object(t, text)
	strict := metav1.FieldValidationStrict
	created, err := client.Create(t.Context(), obj, metav1.CreateOptions{FieldValidation: strict})
	if err != nil {
		t.Fatalf("create %s %s: %v", k.name, obj.GetName(), err)
	}
	if obj.Object["status"] == nil {
		return
	}
	obj.SetResourceVersion(created.GetResourceVersion())
	if _, err := client.UpdateStatus(t.Context(), obj, metav1.UpdateOptions{FieldValidation: strict}); err != nil {
		t.Fatalf("update the status of %s %s: %v", k.name, obj.GetName(), err)
	}
}

// getTable returns a list as the API server renders it for kubectl.
func getTable(t *testing.T, cfg *rest.Config, path string) *metav1.Table {
	t.Helper()
	tab := &metav1.Table{}
	raw, err := testkit.Must(kubernetes.NewForConfig(cfg))(t).RESTClient().Get().AbsPath(path).
		SetHeader("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io").DoRaw(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(raw, tab); err != nil {
		t.Fatal(err)
	}
	return tab
}

// printTable prints the rows of some objects as kubectl does.
func printTable(t *testing.T, out *bytes.Buffer, tab *metav1.Table, wide bool) {
	t.Helper()
	w := tabwriter.NewWriter(out, 6, 4, 3, ' ', 0)
	line := func(cell func(i int) string) {
		var cells []string
		for i, c := range tab.ColumnDefinitions {
			if c.Priority == 0 || wide {
				cells = append(cells, cell(i))
			}
		}
		fmt.Fprintln(w, strings.Join(cells, "\t"))
	}
	line(func(i int) string { return strings.ToUpper(tab.ColumnDefinitions[i].Name) })
	for _, row := range tab.Rows {
		line(func(i int) string {
			switch {
			case row.Cells[i] == nil:
				return "<none>"
			case tab.ColumnDefinitions[i].Type == "date": // it depends on the time
				return "<age>"
			}
			return fmt.Sprint(row.Cells[i])
		})
	}
	fmt.Fprintln(w)
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
}

// golden compares got with a file of testdata, which -update writes.
func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want := testkit.Must(os.ReadFile(path))(t)
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s (-want +got):\n%s", path, diff)
	}
}
