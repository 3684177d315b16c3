// Package page tests the page of "coilctl serve" in a browser.
//
// It owns what people see there, and how long that takes. It must not know how the page is told of changes.
package page

import (
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coil-net/coil/integration/browser"
	"github.com/coil-net/coil/integration/lab/build"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/app/coilctl/web"
	"github.com/coil-net/coil/pkg/plan/page"
	"github.com/coil-net/coil/pkg/testkit"
)

var update = flag.Bool("update", false, "write the pictures of cmd/coilctl")

// played is the page of a cluster that is objects only.
type played struct {
	url string
	// left is told when the cluster isn't followed any more.
	left chan struct{}

	mu   sync.Mutex
	told func()
}

// change changes objects, and tells that.
func (p *played) change(do func()) {
	p.mu.Lock()
	do()
	tell := p.told
	p.mu.Unlock()
	tell()
}

// play serves such a page.
func play(t *testing.T, b *builder) *played {
	t.Helper()
	p := &played{left: make(chan struct{}, 1)}
	l := testkit.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- web.Serve(ctx, l, web.Options{Title: "production", Follow: func(ctx context.Context, done *sync.WaitGroup, changed func()) (func() page.Cluster, error) {
			p.mu.Lock()
			p.told = changed
			p.mu.Unlock()
			done.Go(func() {
				<-ctx.Done()
				p.left <- struct{}{}
			})
			return func() page.Cluster {
				p.mu.Lock()
				defer p.mu.Unlock()
				return known(b)
			}, nil
		}})
	}()
	t.Cleanup(func() {
		stop()
		testkit.Check(t, <-ended)
	})
	p.url = "http://" + l.Addr().String() + "/"
	return p
}

// known is a cluster that all is known of.
func known(b *builder) page.Cluster {
	c := page.Cluster{Objects: b.Objects}
	for _, r := range []string{page.Pools, page.Blocks, page.Claims, page.Egresses, page.Policies, page.ClusterPolicies, page.Gateways, page.Services, page.Nodes, page.Pods, page.Leases} {
		c.Sources = append(c.Sources, page.Source{Resource: r, Known: true})
	}
	return c
}

// drawn waits until a page is there, and returns how long that took from the moment that its address was entered.
func drawn(t *testing.T, p *browser.Tab) time.Duration {
	t.Helper()
	p.Wants("performance.getEntriesByName('drawn').length")
	var ms float64
	testkit.Check(t, p.Eval("performance.getEntriesByName('drawn')[0].startTime", &ms))
	return time.Duration(ms * float64(time.Millisecond))
}

// The page shows each part of a cluster, by day and by night, on a screen and on a phone. cmd/coilctl has its pictures.
func TestPictures(t *testing.T) {
	testkit.Need(t, testkit.APIServer)
	b := small(t)
	p := browser.New(t).Open(play(t, b).url, 1280)
	drawn(t, p)
	for selector, want := range map[string]string{
		"#cluster": "production", "#state": "live", "#count-pools": "4", "#count-nodes": "12", "#count-egresses": "2", "#count-services": "3", "#count-findings": "2",
		"#findings b": "Node worker-4\nNode worker-9", "#pools-list h3 > span:first-child": "batch\ndefault\ngateways\npublic", "#egresses-list h3 > span:first-child": "internet/nat\ninternet/partner",
		"#gateways-table tbody th": "edge-1", "#services-table tbody th": "office/chat\noffice/mail\nshop/web",
	} {
		if got := p.Text(selector); got != want {
			t.Errorf("%s is %q, want %q", selector, got, want)
		}
	}
	// Screen readers tell of canvases what they show.
	var labels string
	testkit.Check(t, p.Eval("[...document.querySelectorAll('canvas')].map(c => c.getAttribute('aria-label')).join('\\n')", &labels))
	if !strings.Contains(labels, "Map of 203.0.113.0/26 and 2001:db8:113::/122: 0 of 64 blocks held, 6 floating, 1 cooling down.") {
		t.Errorf("maps are called %s", labels)
	}
	p.Fits(1280)

	// Keys go through a map, and to the search.
	testkit.Check(t, p.Eval("document.querySelectorAll('canvas')[1].focus()", nil))
	p.Press("Home", 36)
	p.Press("ArrowRight", 39)
	p.Wants("tip.innerText.startsWith('10.100.0.32 to 10.100.0.63\\n1 of 1 block held') && tip.innerText.endsWith('\\nworker-2')")
	p.Press("Enter", 13)
	p.Wants("document.querySelector('#found-list').innerText.includes('default-1 10.100.0.32/27')")
	p.Press("Escape", 27)
	p.Wants("found.hidden")
	p.Press("/", 191)
	p.Wants("document.activeElement === query")
	for _, key := range "203.0.113.6" {
		p.Press(string(key), 0)
	}
	p.Wants("document.querySelector('#found-list').innerText.includes('of Service shop/web, on node worker-3')")
	p.Press("Escape", 27)
	testkit.Check(t, p.Eval("(query.blur(), scrollTo(0, 0))", nil))

	root := testkit.Must(build.Root())(t)
	dir := filepath.Join(root, "cmd/coilctl")
	if !*update {
		dir = t.TempDir()
	}
	const night = "page-night.png"
	p.Picture(filepath.Join(dir, "page.png"), 1280, 1150)
	testkit.Check(t, p.Eval("document.querySelector('#out').scrollIntoView()", nil))
	p.Picture(filepath.Join(dir, "page-ways.png"), 1280, 1000)
	for _, name := range []string{"page.png", "page-ways.png"} {
		made := testkit.Must(os.Stat(filepath.Join(dir, name)))(t)
		kept := testkit.Must(os.Stat(filepath.Join(root, "cmd/coilctl", name)))(t)
		if made.Size() > 150<<10 || kept.Size() > 150<<10 {
			t.Errorf("%s has %d bytes, and %d in cmd/coilctl", name, made.Size(), kept.Size())
		}
	}
	p.Do("Emulation.setEmulatedMedia", browser.Object{"features": []browser.Object{{"name": "prefers-color-scheme", "value": "dark"}}})
	if path := os.Getenv("COIL_PAGE_PICTURES"); path != "" {
		testkit.Check(t, p.Eval("scrollTo(0, 0)", nil))
		p.Picture(filepath.Join(path, night), 1280, 3400)
		p.Picture(filepath.Join(path, "page-phone.png"), 390, 6000)
	}
	p.Size(390, 844)
	p.Fits(390)
	p.Silent()
}

// A large cluster is there at once, and so is a change of it.
func TestLarge(t *testing.T) {
	testkit.Need(t, testkit.APIServer)
	b := large(t, testkit.OperateForm.Times(300, 5000), testkit.OperateForm.Times(1200, 20000))
	cluster := play(t, b)
	p := atOnce(t, b, cluster.url, func() {
		cluster.change(func() {
			n := *b.Blocks[0]
			n.Labels = map[string]string{v2.LabelPool: "pool-0", v2.LabelNode: b.Nodes[0].Name}
			n.Status.Allocated, n.Status.Cooling = 7, 21
			b.Blocks[0] = &n
		})
	})

	// A node that isn't in the first lines is found, with its blocks.
	last := b.Nodes[len(b.Nodes)-1].Name
	testkit.Check(t, p.Eval(fmt.Sprintf("(() => { query.value = %q; query.dispatchEvent(new Event('input')); })()", last), nil))
	p.Wants(fmt.Sprintf("document.querySelectorAll('#found-list li').length === %d", 1+len(b.Blocks)/len(b.Nodes)))
	testkit.Check(t, p.Eval("document.querySelector('#found-list button').click()", nil))
	p.Wants(fmt.Sprintf("document.querySelector('#nodes-table tr[data-key=%q]')", last))
	p.Silent()
}

// atOnce opens the page of a large cluster in which nothing is wrong, and has the first node's block changed: 21 addresses of it cool down.
func atOnce(t *testing.T, b *builder, url string, change func()) *browser.Tab {
	t.Helper()
	chromium := browser.New(t)
	// At first the program and the browser start to work themselves.
	p := chromium.Open(url, 1280)
	took := []time.Duration{drawn(t, p)}
	for range testkit.OperateForm.Times(1, 5) {
		p.Close()
		p = chromium.Open(url, 1280)
		took = append(took, drawn(t, p))
	}
	first := took[0]
	took = slices.Sorted(slices.Values(took[1:]))
	median := took[len(took)/2]
	t.Logf("%d Nodes and %d AddressBlocks are drawn in %s, of %s; first in %s", len(b.Nodes), len(b.Blocks), median, took, first)
	// In the short form others use the machine.
	if limit := testkit.Limit(2 * time.Second); max(first, median) > limit && testkit.OperateForm.Long() {
		t.Errorf("the page is drawn in %s, first in %s, not in %s", median, first, limit)
	}
	for selector, want := range map[string]string{"#count-nodes": commas(len(b.Nodes)), "#count-findings": "", "#fine": "Nothing is wrong."} {
		if got := p.Text(selector); got != want {
			t.Errorf("%s is %q, want %q", selector, got, want)
		}
	}
	began := time.Now()
	change()
	p.Wants("document.querySelector('#nodes-table tbody tr').cells[5].innerText === '21'")
	after := time.Since(began)
	t.Logf("a change is there after %s", after)
	if limit := testkit.Limit(time.Second); after > limit && testkit.OperateForm.Long() {
		t.Errorf("a change is there after %s, not %s", after, limit)
	}
	return p
}

// A page that nobody sees asks for nothing after a while, and has all again as soon as somebody looks.
func TestHidden(t *testing.T) {
	testkit.Need(t, testkit.APIServer)
	b := small(t)
	cluster := play(t, b)
	p := browser.New(t).Open(cluster.url, 1280)
	drawn(t, p)
	hide := func(hidden bool) {
		t.Helper()
		testkit.Check(t, p.Eval(fmt.Sprintf(`(() => {
			Object.defineProperty(document, 'hidden', { value: %t, configurable: true });
			document.dispatchEvent(new Event('visibilitychange'));
		})()`, hidden), nil))
	}
	hide(true)
	if testkit.OperateForm.Long() { // for half a minute somebody may come back
		select {
		case <-cluster.left:
		case <-time.After(testkit.Timeout(2 * time.Minute)):
			t.Fatal("the cluster is followed for a page that nobody sees")
		}
	}
	hide(false)
	cluster.mu.Lock()
	b.Pools = b.Pools[:2]
	cluster.mu.Unlock()
	cluster.change(func() {})
	p.Wants("document.querySelectorAll('#pools-list article').length === 2")
	p.Silent()
}

// commas writes a number of up to six digits as people do.
func commas(n int) string {
	if n < 1000 {
		return fmt.Sprint(n)
	}
	return fmt.Sprintf("%d,%03d", n/1000, n%1000)
}
