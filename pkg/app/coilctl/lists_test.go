package coilctl_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/yaml"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/app/coilctl"
	"github.com/coil-net/coil/pkg/plan/inventory"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/testkit"
)

var update = flag.Bool("update", false, "write what is shown into testdata")

// ago is a time in the past, of which a table tells the same for long enough.
func ago(d time.Duration) metav1.Time {
	return metav1.NewTime(time.Now().Add(-d).Truncate(time.Second))
}

func meta(namespace, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: namespace, Name: name, CreationTimestamp: ago(48 * time.Hour)}
}

// cluster has one of everything, and two where lists have an order.
func cluster() inventory.Objects {
	prefix := func(s string) *string { return &s }
	pool := &v2.AddressPool{ObjectMeta: meta("", "default"), Spec: v2.AddressPoolSpec{BlockSizeBits: 5, Announce: v2.AnnounceRoute, Subnets: []v2.SubnetSet{{IPv4: prefix("10.0.0.0/16"), IPv6: prefix("fd00::/112")}}}}
	pool.Status.Blocks.Summary, pool.Status.Addresses.Summary, pool.Status.Floating = "2/2048", "3/65536", v2.FloatingUsage{Used: 1, Cooling: 2}
	pool.Status.Conditions = []metav1.Condition{{Type: v2.PoolOverlapping, Status: metav1.ConditionTrue, Message: "Node n1 has 10.0.0.1"}}
	block := func(index int32, node, four, six string, used, cooling int32) *v2.AddressBlock {
		b := &v2.AddressBlock{ObjectMeta: meta("", "default-"+strings.Repeat("1", int(index))), Index: index, IPv4: prefix(four), IPv6: prefix(six)}
		changed := ago(36 * time.Hour)
		b.ManagedFields = []metav1.ManagedFieldsEntry{{Time: &changed}}
		b.Labels, b.Status = map[string]string{v2.LabelPool: "default", v2.LabelNode: node}, v2.AddressBlockStatus{Allocated: used, Cooling: cooling}
		return b
	}
	since := ago(12 * time.Hour)
	floating := block(7, "", "192.0.2.7/32", "2001:db8::7/128", 0, 0)
	floating.Name, floating.Labels = "out-7", map[string]string{v2.LabelPool: "out", v2.LabelFloating: v2.FloatingValue}
	floating.Floating = &v2.Floating{
		Owner:   v2.FloatingOwner{Kind: "Service", Namespace: "shop", Name: "web"},
		Holding: v2.FloatingHolding{Holder: "n1", Since: &since}, Ports: []v2.FloatingPort{{Protocol: corev1.ProtocolTCP, Port: 80, Service: "shop/web"}},
	}
	reserved := block(1, "n2", "10.0.0.0/27", "fd00::/123", 0, 0)
	reserved.Labels[v2.LabelReserved] = v2.ReservedValue
	node := &corev1.Node{ObjectMeta: meta("", "n1")}
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "172.16.0.1"}, {Type: corev1.NodeInternalIP, Address: "fd00:172::1"}}
	node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	egress := &v2.Egress{ObjectMeta: meta("internet", "nat"), Spec: v2.EgressSpec{Replicas: 2, Destinations: []string{"0.0.0.0/0", "::/0"}}}
	egress.Status = v2.EgressStatus{Replicas: 1, Clients: 3, Conditions: []metav1.Condition{{Type: v2.EgressAvailable, Status: metav1.ConditionTrue}}}
	service := &corev1.Service{ObjectMeta: meta("shop", "web"), Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}, {Port: 53, Protocol: corev1.ProtocolUDP}}}}
	service.Annotations = map[string]string{loadbalancer.AnnotationAssigned: "192.0.2.7"}
	service.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.7"}}
	service.Status.Conditions = []metav1.Condition{{Type: loadbalancer.ConditionAssigned, Status: metav1.ConditionFalse, Reason: "PoolExhausted", Message: "Wait, or append a subnet"}}
	return inventory.Objects{
		Pools: []*v2.AddressPool{pool}, Blocks: []*v2.AddressBlock{block(2, "n1", "10.0.0.32/27", "fd00::20/123", 3, 1), reserved, floating},
		Nodes: []*corev1.Node{node}, Egresses: []*v2.Egress{egress}, Services: []*corev1.Service{service},
	}
}

// api is an API server that has the objects of a cluster.
type api struct {
	url  string
	mu   sync.Mutex
	all  map[string][]metav1.Object // by resource
	told map[string]chan string     // events of watches, by resource
	// asked are the requests.
	asked []string
	// refused is a resource that nobody may ask for.
	refused string
	// absent are resources that aren't installed.
	absent []string
	// ahead is how far its clock is ahead of that of this computer.
	ahead time.Duration
	// watched is how many watches there are.
	watched int
	// disconnect ends the requests that there are.
	disconnect func()
}

// refuse has nobody ask for a resource any more.
func (a *api) refuse(resource string) {
	a.mu.Lock()
	a.refused = resource
	a.mu.Unlock()
}

func serve(t *testing.T, o inventory.Objects) *api {
	t.Helper()
	a := &api{all: map[string][]metav1.Object{}, told: map[string]chan string{}}
	add(a, "addresspools", o.Pools)
	add(a, "addressblocks", o.Blocks)
	add(a, "egresses", o.Egresses)
	add(a, "egresspolicies", o.Policies)
	add(a, "egressclusterpolicies", o.ClusterPolicies)
	add(a, "addressclaims", o.Claims)
	add(a, "loadbalancergateways", o.Gateways)
	add(a, "leases", o.Leases)
	add(a, "services", o.Services)
	add(a, "nodes", o.Nodes)
	add(a, "pods", o.Coilds)
	add(a, "namespaces", []*corev1.Namespace{{ObjectMeta: meta("", "shop")}})
	s := httptest.NewServer(a)
	t.Cleanup(s.Close)
	a.url, a.disconnect = s.URL, s.CloseClientConnections
	return a
}

func add[T metav1.Object](a *api, resource string, objects []T) {
	a.told[resource] = make(chan string)
	for _, o := range objects {
		a.all[resource] = append(a.all[resource], o)
	}
}

// chosen are the objects of a resource that a request is about.
func (a *api) chosen(r *http.Request) (all []metav1.Object) {
	a.mu.Lock()
	defer a.mu.Unlock()
	selector, err := labels.Parse(r.URL.Query().Get("labelSelector"))
	if err != nil {
		return nil
	}
	for _, o := range a.all[path.Base(r.URL.Path)] {
		if selector.Matches(labels.Set(o.GetLabels())) {
			all = append(all, o)
		}
	}
	return all
}

// ServeHTTP implements http.Handler.
func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	resource, watches := path.Base(r.URL.Path), r.URL.Query().Get("watch") != ""
	a.mu.Lock()
	a.asked = append(a.asked, resource)
	refuses, absent := a.refused == resource, slices.Contains(a.absent, resource)
	w.Header().Set("Date", time.Now().Add(a.ahead).UTC().Format(http.TimeFormat))
	a.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	if refuses {
		w.WriteHeader(http.StatusForbidden)
		_, _ = io.WriteString(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403,"message":"no right"}`)
		return
	}
	if absent {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.WriteHeader(http.StatusNotFound)
		_, _ = io.WriteString(w, "404 page not found\n")
		return
	}
	if path.Base(path.Dir(r.URL.Path)) == "leases" {
		a.lease(w, resource)
		return
	}
	if !watches {
		_ = json.NewEncoder(w).Encode(map[string]any{"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1", "metadata": map[string]any{"resourceVersion": "1"}, "items": a.chosen(r)})
		return
	}
	a.watches(1)
	defer a.watches(-1)
	for _, o := range a.chosen(r) {
		fmt.Fprintln(w, eventOf("ADDED", resource, o))
	}
	kind, version := kindOf(resource)
	fmt.Fprintf(w, `{"type":"BOOKMARK","object":{"kind":%q,"apiVersion":%q,"metadata":{"resourceVersion":"1","annotations":{"k8s.io/initial-events-end":"true"}}}}`, kind, version)
	for {
		w.(http.Flusher).Flush()
		select {
		case <-r.Context().Done():
			return
		case e := <-a.told[resource]:
			fmt.Fprintln(w, e)
		}
	}
}

// watches counts watches.
func (a *api) watches(n int) {
	a.mu.Lock()
	a.watched += n
	a.mu.Unlock()
}

// lease answers with a Lease.
func (a *api) lease(w http.ResponseWriter, name string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	i := slices.IndexFunc(a.all["leases"], func(o metav1.Object) bool { return o.GetName() == name })
	if i < 0 {
		w.WriteHeader(http.StatusNotFound)
		_, _ = io.WriteString(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404}`)
		return
	}
	text, _ := json.Marshal(a.all["leases"][i])
	fmt.Fprintf(w, `{"kind":"Lease","apiVersion":"coordination.k8s.io/v1",%s`, text[1:])
}

func kindOf(resource string) (kind, version string) {
	switch resource {
	case "nodes":
		return "Node", "v1"
	case "pods":
		return "Pod", "v1"
	case "services":
		return "Service", "v1"
	}
	return map[string]string{
		"addresspools": "AddressPool", "addressblocks": "AddressBlock", "egresses": "Egress", "egresspolicies": "EgressPolicy", "egressclusterpolicies": "EgressClusterPolicy",
		"addressclaims": "AddressClaim", "loadbalancergateways": "LoadBalancerGateway",
	}[resource], "coil.cybozu.com/v2"
}

// eventOf is an event of a watch.
func eventOf(event, resource string, o metav1.Object) string {
	text, err := json.Marshal(o)
	if err != nil {
		return err.Error()
	}
	kind, version := kindOf(resource)
	return fmt.Sprintf(`{"type":%q,"object":{"kind":%q,"apiVersion":%q,%s}`, event, kind, version, text[1:])
}

// run runs a command, whose program has a name.
func (a *api) run(program string, args ...string) (code int, out, errOut string) {
	var o, e bytes.Buffer
	code = coilctl.Main(append([]string{program}, append(args, "--server="+a.url)...), strings.NewReader(""), &o, &e)
	return code, o.String(), e.String()
}

// Lists are tables, wide tables, JSON and YAML with the same values; testdata has them.
func TestLists(t *testing.T) {
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	a := serve(t, cluster())
	for _, command := range []string{"pools", "pools forecast", "nodes", "blocks", "addresses", "egresses", "services"} {
		t.Run(command, func(t *testing.T) {
			var b strings.Builder
			for _, options := range []string{"", " -o wide", " --help"} {
				args := strings.Fields(command + options)
				code, out, errOut := a.run("coilctl", args...)
				if code != 0 || errOut != "" {
					t.Errorf("coilctl %q: exit code %d, %s", args, code, errOut)
				}
				out, _, _ = strings.Cut(out, "\nGlobal Flags:")
				fmt.Fprintf(&b, "$ coilctl %s\n%s", strings.Join(args, " "), out)
			}
			golden := filepath.Join("testdata", strings.ReplaceAll(command, " ", "-")+".txt")
			if *update {
				testkit.Check(t, os.WriteFile(golden, []byte(b.String()), 0o644))
			}
			if diff := cmp.Diff(string(testkit.Must(os.ReadFile(golden))(t)), b.String()); diff != "" {
				t.Errorf("-want +got (-update writes it):\n%s", diff)
			}
			var asJSON, asYAML []map[string]any
			_, out, _ := a.run("coilctl", strings.Fields(command+" -o json")...)
			testkit.Check(t, json.Unmarshal([]byte(out), &asJSON))
			_, out, _ = a.run("coilctl", strings.Fields(command+" -o yaml")...)
			testkit.Check(t, yaml.Unmarshal([]byte(out), &asYAML))
			if diff := cmp.Diff(asJSON, asYAML); diff != "" || len(asJSON) == 0 {
				t.Errorf("JSON and YAML differ, or have nothing: %s", diff)
			}
		})
	}
}

// Rows are chosen by names, namespace and flags. What isn't there is an error, and an empty list says so where no program reads it.
func TestChosen(t *testing.T) {
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	a := serve(t, cluster())
	for _, tt := range []struct {
		args          string
		code          int
		names, errOut string
	}{
		{"blocks default-1", 0, "default-1", ""},
		{"blocks --pool=default --node=n1", 0, "default-11", ""},
		{"blocks --pool=other", 0, "", "no AddressBlocks found\n"},
		{"blocks out-7 default-1 red", 1, "", "error: there is no AddressBlock out-7, nor red\n"},
		{"addresses 192.0.2.7", 0, "192.0.2.7,2001:db8::7", ""},
		{"addresses 2001:db8::7", 0, "192.0.2.7,2001:db8::7", ""},
		{"addresses out-7", 0, "192.0.2.7,2001:db8::7", ""},
		{"addresses 192.0.2.8", 1, "", "error: there is no floating address 192.0.2.8\n"},
		{"egresses --namespace=internet nat", 0, "internet", ""},
		{"egresses --namespace=other", 0, "", "no Egresses found\n"},
		{"services -n other web", 1, "", "error: there is no Service of Coil web\n"},
		{"nodes n2", 0, "n2", ""},
		{"pools default", 0, "default", ""},
		{"nodes -o csv", 1, "", "error: --output can't be \"csv\": choose one of table, json, yaml, wide\n"},
		{"pools --map --watch --svg=-", 1, "", "error: --watch draws maps as text only\n"},
	} {
		code, out, errOut := a.run("coilctl", strings.Fields(tt.args)...)
		var names []string
		for line := range strings.Lines(out) {
			names = append(names, strings.Fields(line)[0])
		}
		if len(names) > 0 {
			names = names[1:]
		}
		if code != tt.code || strings.Join(names, " ") != tt.names || errOut != tt.errOut {
			t.Errorf("coilctl %s: exit code %d, %q, %q", tt.args, code, names, errOut)
		}
	}
	a = serve(t, inventory.Objects{})
	for _, command := range []string{"pools", "pools forecast", "nodes", "blocks", "addresses", "egresses", "services"} {
		if code, out, errOut := a.run("coilctl", strings.Fields(command)...); code != 0 || out != "" || !strings.HasPrefix(errOut, "no ") || !strings.HasSuffix(errOut, " found\n") {
			t.Errorf("coilctl %s of an empty cluster: exit code %d, %q, %q", command, code, out, errOut)
		}
		if code, out, errOut := a.run("coilctl", strings.Fields(command+" -o json")...); code != 0 || out != "[]\n" || errOut != "" {
			t.Errorf("coilctl %s -o json of an empty cluster: exit code %d, %q, %q", command, code, out, errOut)
		}
	}
	a.refused = "nodes"
	if code, out, errOut := a.run("coilctl", "nodes"); code != 1 || out != "" || errOut != "error: list nodes: no right\n" {
		t.Errorf("without the right to list nodes: exit code %d, %q, %q", code, out, errOut)
	}
	a.url = "http://127.0.0.1:1"
	if code, _, errOut := a.run("coilctl", "nodes"); code != 1 || strings.Count(errOut, "connection refused") != 1 {
		t.Errorf("without an API server: exit code %d, %q", code, errOut)
	}
}

// Each command asks for what its help names, and for nothing else.
func TestRights(t *testing.T) {
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	for command, rights := range map[string]string{
		"pools":          "list addresspools of coil.cybozu.com",
		"pools forecast": "list addressblocks, addresspools of coil.cybozu.com",
		"nodes":          "list nodes, pods; list addressblocks of coil.cybozu.com",
		"blocks":         "list addressblocks of coil.cybozu.com",
		"addresses":      "list addressblocks of coil.cybozu.com",
		"egresses":       "list egressclusterpolicies, egresses, egresspolicies of coil.cybozu.com",
		"services":       "list services",
	} {
		a := serve(t, cluster())
		if _, help, _ := a.run("coilctl", strings.Fields(command+" --help")...); !strings.Contains(help, "\nRights: "+rights+"; with --watch, watch them, too.") {
			t.Errorf("coilctl %s --help doesn't say %q:\n%s", command, rights, help)
		}
		if code, _, errOut := a.run("coilctl", strings.Fields(command)...); code != 0 {
			t.Errorf("coilctl %s: %s", command, errOut)
		}
		slices.Sort(a.asked)
		want := strings.FieldsFunc(strings.ReplaceAll(strings.TrimSuffix(rights, " of coil.cybozu.com"), "list ", ""), func(r rune) bool { return strings.ContainsRune(",; ", r) })
		slices.Sort(want)
		if diff := cmp.Diff(want, a.asked); diff != "" {
			t.Errorf("coilctl %s asks for: %s", command, diff)
		}
	}
}

// Shells complete the names of objects, without those that are there, and values of flags. kubectl starts the program by another name.
func TestCompletion(t *testing.T) {
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	a := serve(t, cluster())
	for args, want := range map[string]string{
		"pools ": "drain forecast default", "pools forecast ": "default", "pools drain ": "default", "pools drain default ": "", "nodes ": "n1", "blocks ": "release default-11 default-1", "blocks release ": "default-11 default-1", "blocks release default-1 ": "", "db dump ": "n1", "blocks default-1 ": "default-11", "addresses ": "out-7", "egresses ": "nat", "services ": "web",
		"sysdump --node ": "n1", "blocks --pool ": "default", "blocks --node ": "n1", "nodes -o ": "table json yaml wide", "trace --protocol ": "icmp tcp udp", "nodes --color ": "auto always never", "egresses --namespace ": "shop", "egresses --namespace other ": "nat",
		"why service ": "shop/web", "why service --namespace shop ": "web", "why service shop/web ": "",
		"selftest --pool ": "default", "selftest --nodes ": "n1", "selftest --nodes n2,": "n2,n1", "selftest --nodes n1,": "", "selftest --egress ": "internet/nat",
	} {
		for _, program := range []string{"coilctl", "kubectl_complete-coil"} {
			complete := append(strings.Split(args, " "), "")
			complete = append([]string{"--server=" + a.url}, complete[:len(complete)-1]...)
			if program == "coilctl" {
				complete = append([]string{"__complete"}, complete...)
			}
			var out, errOut bytes.Buffer
			code := coilctl.Main(append([]string{program}, complete...), strings.NewReader(""), &out, &errOut)
			list, directive, _ := strings.Cut(out.String(), ":")
			var names []string
			for line := range strings.Lines(list) { // commands have a description
				name, _, _ := strings.Cut(strings.TrimSpace(line), "\t")
				names = append(names, name)
			}
			if code != 0 || strings.Join(names, " ") != want || strings.TrimSpace(directive) != "4" {
				t.Errorf("%s %q: exit code %d, %q, want %q: %s", program, complete, code, out.String(), want, errOut.String())
			}
		}
	}
	a.refused = "nodes"
	var out, errOut bytes.Buffer
	if coilctl.Main([]string{"coilctl", "__complete", "--server=" + a.url, "nodes", ""}, strings.NewReader(""), &out, &errOut); out.String() != ":1\n" {
		t.Errorf("without the right to list nodes: %q", out.String())
	}
}
