package coilctl_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/pkg/app/coilctl"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/health"
	"github.com/coil-net/coil/pkg/plan/page"
	"github.com/coil-net/coil/pkg/testkit"
)

// served is a "coilctl serve".
type served struct {
	*watching
	url string
}

// servePage starts the command.
func (a *api) servePage(t *testing.T) *served {
	t.Helper()
	r, out := io.Pipe()
	s := &served{watching: a.start(t, out, r, "serve", "--listen=127.0.0.1:0")}
	select {
	case s.url = <-s.lines:
	case <-time.After(testkit.Timeout(20 * time.Second)):
		t.Fatal("it tells no address")
	}
	return s
}

// looking is what a browser knows of the page.
type looking struct {
	t    *testing.T
	all  int // how often it got all rows
	rows map[string]map[string]json.RawMessage
	told chan pageUpdate
}

type pageUpdate struct {
	All  bool
	Rows map[string]map[string]json.RawMessage
	Gone map[string][]string
}

// look opens the page, as a browser does, until the test ends or the result is called.
func (s *served) look() (*looking, func()) {
	s.t.Helper()
	answer := testkit.Must(http.Get(s.url + "events"))(s.t)
	if answer.StatusCode != http.StatusOK || answer.Header.Get("Content-Type") != "text/event-stream" {
		s.t.Fatalf("it answers %s, %s", answer.Status, answer.Header)
	}
	s.t.Cleanup(func() { answer.Body.Close() })
	l := &looking{t: s.t, told: make(chan pageUpdate, 1000)}
	go func() {
		defer close(l.told)
		lines := bufio.NewScanner(answer.Body)
		lines.Buffer(nil, 64<<20)
		for lines.Scan() {
			var u pageUpdate
			if text, ok := strings.CutPrefix(lines.Text(), "data: {"); ok && json.Unmarshal([]byte("{"+text), &u) == nil {
				l.told <- u
			}
		}
	}()
	return l, func() { answer.Body.Close() }
}

// until reads until the page is so.
func (l *looking) until(what string, is func() bool) {
	l.t.Helper()
	late := time.After(testkit.Timeout(30 * time.Second))
	for !is() {
		select {
		case u, ok := <-l.told:
			if !ok {
				l.t.Fatalf("%s: the connection ends; the page has %s", what, l.rows)
			}
			if u.All {
				l.all++
				l.rows = map[string]map[string]json.RawMessage{}
			}
			for section, rows := range u.Rows {
				for key, row := range rows {
					if l.rows[section] == nil {
						l.rows[section] = map[string]json.RawMessage{}
					}
					l.rows[section][key] = row
				}
			}
			for section, keys := range u.Gone {
				for _, key := range keys {
					delete(l.rows[section], key)
				}
			}
		case <-late:
			l.t.Fatalf("%s: not yet; the page has %s", what, l.rows)
		}
	}
}

// row reads a row.
func row[T any](l *looking, section, key string) (value T) {
	l.t.Helper()
	if text := l.rows[section][key]; text != nil {
		testkit.Check(l.t, json.Unmarshal(text, &value))
	}
	return value
}

// complete says that all sources are known.
func (l *looking) complete() bool {
	for key := range l.rows["sources"] {
		if !row[page.Source](l, "sources", key).Known {
			return false
		}
	}
	return l.rows != nil
}

// keys are those of a section, sorted.
func (l *looking) keys(section string) (keys []string) {
	for key := range l.rows[section] {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}

// The page has the state of the cluster, which is read from the start, then what changes, and finds objects. Two browsers share the watches.
func TestServe(t *testing.T) {
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	o := cluster()
	now := metav1.NowMicro()
	o.Leases = []*coordinationv1.Lease{{ObjectMeta: metav1.ObjectMeta{Name: plan.IPAMLease}, Spec: coordinationv1.LeaseSpec{RenewTime: &now}}}
	a := serve(t, o)
	s := a.servePage(t)
	testkit.Eventually(t, 20*time.Second, "all is read before somebody looks", func() error {
		answer := testkit.Must(http.Get(s.url + "find?q=n1"))(t)
		defer answer.Body.Close()
		var found page.Result
		if err := json.NewDecoder(answer.Body).Decode(&found); err != nil || len(found.Found) == 0 {
			return fmt.Errorf("answer %s, found %+v, error %v", answer.Status, found, err)
		}
		return nil
	})
	first, _ := s.look()
	first.until("all is known", first.complete)
	second, leave := s.look()
	second.until("all is known", second.complete)
	for _, l := range []*looking{first, second} {
		want := []string{
			"AddressPool default: ", "Lease coil-egress-leader: NoLeader", "Lease coil-lb-leader: NoLeader", "Node n1: NoCoild", "Service shop/web: PoolExhausted",
		}
		if diff := cmp.Diff(want, l.keys("findings")); diff != "" {
			t.Errorf("the findings: %s", diff)
		}
		if pool := row[page.Pool](l, "pools", "default"); pool.Blocks.Summary != "2/2048" || pool.Attention[0] != "Node n1 has 10.0.0.1" {
			t.Errorf("the pool is %+v", pool)
		}
		// The block default-11 has the index 2.
		if strip := row[page.Strip](l, "maps", "default/0/0"); len(strip.Cells) != 64 || !cmp.Equal(strip.Cells[2].Holders, []string{"n1"}) || strip.Cells[2].Allocated != 3 {
			t.Errorf("the map begins with %+v", strip)
		}
		for section, want := range map[string]string{"nodes": "n1 n2", "egresses": "internet/nat", "addresses": "out-7", "services": "shop/web", "policies": "", "gateways": ""} {
			if got := strings.Join(l.keys(section), " "); got != want {
				t.Errorf("the section %s has %q, want %q", section, got, want)
			}
		}
		if service := row[page.Service](l, "services", "shop/web"); !cmp.Equal(service.At, []string{"n1"}) || !service.Waits {
			t.Errorf("the Service is %+v", service)
		}
	}
	leave()

	began, had := time.Now(), first.all
	a.told["addressblocks"] <- eventOf("MODIFIED", "addressblocks", used(o.Blocks[0], 9))
	first.until("the map has the change", func() bool { return row[page.Strip](first, "maps", "default/0/0").Cells[2].Allocated == 9 })
	// It doesn't wait until the page is judged again, which is every 10 s. How soon a change is there is measured at full size (integration/page).
	if took := time.Since(began); took > testkit.Timeout(5*time.Second) {
		t.Errorf("a change takes %s", took)
	}
	a.told["addressblocks"] <- eventOf("DELETED", "addressblocks", o.Blocks[2])
	first.until("the address is gone", func() bool { return len(first.rows["addresses"]) == 0 })
	if first.all != had {
		t.Error("a change has all rows")
	}

	var result page.Result
	answer := testkit.Must(http.Get(s.url + "find?q=" + url.QueryEscape("10.0.0.40")))(t)
	testkit.Check(t, json.NewDecoder(answer.Body).Decode(&result))
	if len(result.Found) != 2 || result.Found[1].Name != "default-11" || !strings.Contains(result.Found[1].Says, "held by node n1; 9 of 32 addresses in use") {
		t.Errorf("the address is in %+v", result)
	}
	s.interrupt()
	asked := slices.DeleteFunc(a.asked, func(r string) bool { return strings.HasPrefix(r, "coil-") })
	slices.Sort(asked)
	var want []string
	for _, resource := range strings.Fields("addressblocks addressclaims addresspools egressclusterpolicies egresses egresspolicies loadbalancergateways nodes pods services") {
		want = append(want, resource, resource) // a list and a watch
	}
	if diff := cmp.Diff(want, asked); diff != "" {
		t.Errorf("it asks for: %s", diff)
	}
}

// What the API server refuses is told in the page, which shows the rest, and takes nothing that it can't read for absent.
func TestServeRefused(t *testing.T) {
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	a := serve(t, cluster())
	a.refuse("pods")
	s := a.servePage(t)
	l, _ := s.look()
	l.until("the refusal is told", func() bool {
		return row[page.Source](l, "sources", "pods").Problem == "no right" && row[page.Source](l, "sources", "services").Known && row[page.Source](l, "sources", "addressblocks").Known
	})
	l.until("the other parts are there", func() bool { return len(l.rows["services"]) == 1 && len(l.rows["pools"]) == 1 })
	if lacks := row[page.Section](l, "sections", "nodes").Lacks; !slices.Equal(lacks, []string{"pods"}) || len(l.rows["nodes"]) > 0 {
		t.Errorf("nodes lack %q, and are %s", lacks, l.rows["nodes"])
	}
	for key := range l.rows["findings"] {
		if f := row[health.Finding](l, "findings", key); f.Kind == "Node" {
			t.Errorf("without pods there is %+v", f)
		}
	}
	a.refuse("")
	l.until("nodes are there", func() bool { return len(l.rows["nodes"]) == 2 })
	if problem := row[page.Source](l, "sources", "pods"); problem.Problem != "" || problem.Since != nil {
		t.Errorf("the problem stays: %+v", problem)
	}
	s.interrupt()
}

// When the API server is away the page says since when, and shows what was known; then it has what changed meanwhile.
func TestServeAgain(t *testing.T) {
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	o := cluster()
	a := serve(t, o)
	s := a.servePage(t)
	l, _ := s.look()
	l.until("all is known", func() bool { return len(l.rows["nodes"]) == 2 })
	a.refuse("addressblocks")
	a.disconnect()
	// That ended the stream of the page's own browser as little as it did the program.
	l.until("the problem is told", func() bool { return row[page.Source](l, "sources", "addressblocks").Problem != "" })
	if source := row[page.Source](l, "sources", "addressblocks"); source.Since == nil || !source.Known || len(l.rows["nodes"]) != 2 {
		t.Errorf("without an API server there are %+v and %s", source, l.rows["nodes"])
	}
	a.mu.Lock()
	a.all["addressblocks"][0] = used(o.Blocks[0], 9)
	a.mu.Unlock()
	a.refuse("")
	l.until("the change is there", func() bool { return row[page.Strip](l, "maps", "default/0/0").Cells[2].Allocated == 9 })
	l.until("the problem is over", func() bool { return row[page.Source](l, "sources", "addressblocks").Problem == "" })
	s.interrupt()
}

// A Lease that nobody renews is a finding, and so is none. What isn't read yet is none.
func TestServeLeases(t *testing.T) {
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	o := cluster()
	old := metav1.NewMicroTime(time.Now().Add(-time.Hour))
	o.Leases = []*coordinationv1.Lease{{ObjectMeta: metav1.ObjectMeta{Name: plan.IPAMLease}, Spec: coordinationv1.LeaseSpec{RenewTime: &old}}}
	a := serve(t, o)
	s := a.servePage(t)
	l, _ := s.look()
	none := 0
	l.until("all is known", func() bool {
		for key := range l.rows["findings"] {
			if f := row[health.Finding](l, "findings", key); f.Kind == "Lease" && !row[page.Source](l, "sources", "leases").Known {
				none++
			}
		}
		return l.complete()
	})
	var found []string
	for key := range l.rows["findings"] {
		if f := row[health.Finding](l, "findings", key); f.Kind == "Lease" {
			found = append(found, fmt.Sprint(f.Name, " ", f.Since.IsZero()))
		}
	}
	if slices.Sort(found); len(found) != 3 || none > 0 || !strings.HasSuffix(found[1], "false") {
		t.Errorf("the findings are %q, and there were %d before Leases were read", found, none)
	}
	s.interrupt()
}

// The page is for this computer alone, unless somebody says so. The address has to be free.
func TestServeListen(t *testing.T) {
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	a := serve(t, cluster())
	s := a.servePage(t)
	address := strings.TrimSuffix(strings.TrimPrefix(s.url, "http://"), "/")
	for listen, want := range map[string]string{
		"0.0.0.0:0":   "error: --listen isn't an address of this computer alone",
		":0":          "error: --listen isn't an address of this computer alone",
		"192.0.2.1:0": "error: --listen isn't an address of this computer alone",
		"nowhere":     "error: --listen=nowhere: ",
		address:       "error: --listen=" + address + ": ",
	} {
		if code, out, errOut := a.run("coilctl", "serve", "--listen="+listen); code != 1 || out != "" || !strings.HasPrefix(errOut, want) {
			t.Errorf("--listen=%s: exit code %d, %q, %q", listen, code, out, errOut)
		}
	}
	s.interrupt()
	var out, errOut bytes.Buffer
	if coilctl.Main([]string{"coilctl", "serve", "--help"}, strings.NewReader(""), &out, &errOut); !strings.Contains(out.String(),
		"\nRights: list services, nodes, pods; list addressblocks, addressclaims, addresspools, egressclusterpolicies, egresses, egresspolicies, loadbalancergateways of coil.cybozu.com; "+
			"watch these, too; get leases of coordination.k8s.io in the namespace kube-system.") {
		t.Errorf("the help doesn't name rights: %s", out.String())
	}
}
