package routerhealth

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/echo"
	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit"
)

// routersAt are addresses in 10.N.0.0/16, N the number of an Egress.
func routersAt(egress, n int) (addrs []netip.Addr) {
	for i := range n {
		addrs = append(addrs, netip.AddrFrom4([4]byte{byte(10 + egress>>8), byte(egress), byte(i >> 8), byte(i)}))
	}
	return addrs
}

// groupOf is that of an Egress whose routers all live.
func groupOf(egress string, routers ...netip.Addr) client.Group {
	return client.Group{Egress: egress, Family: dataplane.FamilyOf(routers[0]), Direct: true, Members: routers}
}

// nodeOf returns a Checker without a Listener.
func nodeOf(n Network) *Checker { return New(n, &cluster{}, &cluster{}) }

// cluster has an Egress, and the Events of it. It is told of pods and Egresses, too.
type cluster struct {
	egress   v2.Egress
	events   []string
	pods     []string
	egresses []string
}

func (c *cluster) Egress(context.Context, types.NamespacedName, bool) (*v2.Egress, error) {
	return &c.egress, nil
}

func (c *cluster) Eventf(_, _ runtime.Object, _, reason, _, note string, args ...any) {
	c.events = append(c.events, reason+": "+fmt.Sprintf(note, args...))
}

func (c *cluster) EgressChanged(name types.NamespacedName) {
	c.egresses = append(c.egresses, name.String())
}

func (c *cluster) PodChanged(name types.NamespacedName) { c.pods = append(c.pods, name.String()) }

// at is the sandbox of a pod.
func at(namespace, pod string) node.Sandbox {
	return node.Sandbox{
		ID: attachment.ID{ContainerID: "c-" + pod, IfName: "eth0"}, Pod: store.Pod{Namespace: namespace, Name: pod}, Netns: store.Netns{Path: "/" + pod},
	}
}

// sends makes a pod one that has tunnels to all routers of groups.
func (c *Checker) sends(namespace, name string, groups ...client.Group) *pod {
	links := map[netip.Addr]int{}
	for _, g := range groups {
		for _, a := range g.Routers() {
			links[a] = 1 + len(links)
		}
	}
	s := at(namespace, name)
	c.Forget(s.ID)
	c.Update(s, groups, links, false)
	return c.pods[s.ID]
}

// attack makes pods of a namespace clients of Egresses of their own, with as many routers as a pod may have.
func (c *Checker) attack(namespace string, pods int) (all []*pod) {
	for p := range pods {
		var groups []client.Group
		for e := range 8 {
			groups = append(groups, groupOf(fmt.Sprintf("%s/%d-%d", namespace, p, e), routersAt(100+8*p+e, client.MostTunnels/8)...))
		}
		all = append(all, c.sends(namespace, fmt.Sprintf("%s-%d", namespace, p), groups...))
	}
	return all
}

// deadOf returns which of some routers are dead.
func (c *Checker) deadOf(addrs []netip.Addr) (dead []netip.Addr, n int) {
	for key, r := range c.routers {
		if r.dead && slices.Contains(addrs, key.addr) {
			dead = append(dead, key.addr)
		}
	}
	return dead, len(dead)
}

// waits returns how long somebody who wants Manager.mu again and again has to wait for it in all while f runs.
func (c *Checker) waits(f func()) (waited time.Duration) {
	var done atomic.Bool
	end := make(chan time.Duration)
	go func() {
		var sum time.Duration
		for !done.Load() {
			began := time.Now()
			c.mu.Lock()
			sum += time.Since(began)
			c.mu.Unlock()
			time.Sleep(100 * time.Microsecond) // others want it, too
		}
		end <- sum
	}()
	f()
	done.Store(true)
	return <-end
}

// echoes answer all questions but those to silent routers, and count them.
type echoes struct {
	mu     sync.Mutex
	silent func(netip.Addr) bool
	deaf   map[netip.Addr]string // the network namespace of a pod that doesn't hear a router
	asked  map[netip.Addr]int
	total  int
	twice  []string // who asks a router twice at once
}

// Ask implements Network.
func (e *echoes) Ask(_ context.Context, at store.Netns, _ time.Duration, questions []echo.Question) (answers []echo.Answer, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	seen := map[netip.Addr]bool{}
	for _, q := range questions {
		if seen[q.To] {
			e.twice = append(e.twice, fmt.Sprint(at.Path, " ", q.To))
		}
		seen[q.To] = true
		e.asked[q.To]++
		e.total++
		answer := echo.Given
		if e.silent(q.To) || e.deaf[q.To] == at.Path {
			answer = echo.Missing
		}
		answers = append(answers, answer)
	}
	return answers, nil
}

// round asks once, and returns how often each router was asked, and all together.
func (e *echoes) round(t *testing.T, c *Checker, silent func(netip.Addr) bool) (asked map[netip.Addr]int, total int) {
	t.Helper()
	e.silent, e.asked, e.total, e.twice = silent, map[netip.Addr]int{}, 0, nil
	c.askOnce(klog.NewContext(t.Context(), klog.Logger{}), &cluster{}) // thousands of routers die
	if len(e.twice) > 0 {
		t.Errorf("routers are asked twice at once: %s", strings.Join(e.twice[:min(3, len(e.twice))], ", "))
	}
	return e.asked, e.total
}

func all(netip.Addr) bool    { return true }
func nobody(netip.Addr) bool { return false }

// ADD, DEL and failover of a node wait little for who asks, however many routers never answer.
func TestRoutersThatNeverAnswerStallNobody(t *testing.T) {
	var e echoes
	c := nodeOf(&e)
	c.attack("loud", 30)
	var least time.Duration
	limit := testkit.Limit(50 * time.Millisecond)
	for round := range 40 { // other processes may have the processors
		waited := c.waits(func() { e.round(t, c, all) })
		t.Logf("round %d: waited for %s", round, waited)
		if round == 0 || waited < least {
			least = waited
		}
		if least < limit && round > 2 {
			return
		}
	}
	t.Errorf("who wants the mutex waits for %s in a round, want at most %s", least, limit)
}

// Pods of one namespace that have more to ask than a node asks keep no question of another's waiting, also if they
// are clients of the same Egress; what has to wait is asked soon, and isn't silent meanwhile.
func TestNamespacesShareQuestions(t *testing.T) {
	var e echoes
	c := nodeOf(&e)
	calm, calmGroup := routersAt(1, 4), groupOf("calm/a", routersAt(1, 4)...)
	pods := c.attack("loud", 20)
	for _, s := range pods {
		c.sends(s.Namespace, s.Name, append(s.groups[1:], calmGroup)...)
	}
	c.sends("calm", "calm", calmGroup)
	isLoud := func(a netip.Addr) bool { return !slices.Contains(calm, a) }
	known := map[netip.Addr]bool{}
	missed := map[netip.Addr]int{}
	for round := range 20 {
		silent := nobody
		if round >= 5 {
			silent = isLoud
		}
		waited := map[routerKey]int{}
		for key, r := range c.routers {
			waited[key] = r.waited
		}
		asked, total := e.round(t, c, silent)
		if total > mostQuestions {
			t.Errorf("round %d: %d questions", round, total)
		}
		for _, a := range calm {
			if asked[a] == 0 {
				t.Errorf("round %d: router %s of the other namespace waits", round, a)
			}
		}
		for a, n := range asked {
			known[a] = true
			if silent(a) {
				missed[a] += n
			}
		}
		if n := len(known); round == 4 && n != len(c.routers) {
			t.Errorf("%d of %d routers were asked in five rounds", n, len(c.routers))
		}
		for key, r := range c.routers {
			if n := asked[key.addr]; n == 0 && r.waited != waited[key]+1 || n > 0 && round < 5 && r.waited != 0 {
				t.Fatalf("round %d: router %s was asked %d times and has waited for %d rounds, before %d", round, key.addr, n, r.waited, waited[key])
			}
			if r.missed > missed[key.addr] {
				t.Fatalf("round %d: router %s has missed %d questions of %d", round, key.addr, r.missed, missed[key.addr])
			}
		}
	}
	for key, r := range c.routers {
		if r.dead != isLoud(key.addr) {
			t.Errorf("router %s of %s: dead is %t after 15 rounds", key.addr, key.egress, r.dead)
		}
	}
	for round := range deathMisses {
		if _, dead := c.deadOf(calm); dead > 0 {
			t.Errorf("dead after %d rounds", round)
		}
		e.round(t, c, func(a netip.Addr) bool { return isLoud(a) || a == calm[0] })
	}
	if addrs, dead := c.deadOf(calm); dead != 1 || addrs[0] != calm[0] {
		t.Errorf("%v are dead, want %s", addrs, calm[0])
	}
}

// A node whose tenants mean well asks all there is to ask, also when all routers die at once, or many come back.
func TestQuestionsOfHonestNodes(t *testing.T) {
	const pods, egresses = 100, 64
	var e echoes
	c := nodeOf(&e)
	var groups []client.Group
	for e := range egresses {
		four := routersAt(e, 4)
		var six []netip.Addr
		for _, a := range four {
			b := a.As4()
			six = append(six, netip.AddrFrom16([16]byte{0: 0xfd, 12: b[0], 13: b[1], 14: b[2], 15: b[3]}))
		}
		name := fmt.Sprint("net/", e)
		groups = append(groups, groupOf(name, four...), groupOf(name, six...))
	}
	for p := range pods {
		s := c.sends("ns", fmt.Sprint(p), groups...)
		for a := range s.links {
			s.heard(routerKey{addr: a}, true)
		}
	}
	routers := egresses * 4 * 2
	quarter := func(a netip.Addr) bool { b := a.As16(); return b[15] == 0 }
	for _, phase := range []struct {
		what   string
		rounds int
		silent func(netip.Addr) bool
		least  int
	}{{"all answer", 2, nobody, routers}, {"none does", 10, all, deathMisses * routers}, {"they do", 5, nobody, routers}, {"a quarter doesn't", 10, quarter, routers},
		{"it is silent for long", 1, quarter, routers}, {"it comes back", 10, nobody, pods * routers / 4}} {
		if phase.what == "it is silent for long" {
			for _, s := range c.pods {
				for key := range c.routers {
					if quarter(key.addr) {
						s.missed[key] = deathMisses
					}
				}
			}
		}
		most := 0
		for range phase.rounds {
			_, total := e.round(t, c, phase.silent)
			most = max(most, total)
			if c.crowded {
				t.Errorf("%s: questions have to wait", phase.what)
			}
		}
		t.Logf("%s: at most %d questions in a round", phase.what, most)
		if most < phase.least || most > mostQuestions {
			t.Errorf("%s: %d questions in a round, want at least %d and at most %d", phase.what, most, phase.least, mostQuestions)
		}
	}
}

// A router that was dead is known as long as a pod has it, also one that gets it while a round begins.
func TestRouterIsMadeMeanwhile(t *testing.T) {
	var e echoes
	c := nodeOf(&e)
	g := groupOf("net/a", routersAt(1, 2)...)
	c.sends("ns", "p", groupOf("net/a", g.Members[0]))
	late := c.sends("ns", "late", g)
	c.Update(late.Sandbox, nil, nil, false)
	e.round(t, c, nobody)
	old := routerKey{"net/a", g.Members[1]}
	c.routers[old] = &router{liveness: deadAlready()}
	other := routerKey{"net/a", routersAt(1, 3)[2]}
	c.routers[other] = &router{liveness: deadAlready()}
	late.heard(other, true)
	late.heard(other, false)
	senders := c.senders()
	made := []client.Group{{Egress: "net/a", Direct: true, Members: g.Members[:1], Dead: g.Members[1:]}}
	c.Update(late.Sandbox, made, map[netip.Addr]int{g.Members[0]: 1, g.Members[1]: 2}, false)
	c.forgetRouters(len(c.meet(gather(senders))))
	if r := c.routers[old]; r == nil || !r.dead {
		t.Error("it is forgotten though a pod has it")
	}
	if c.routers[other] != nil || late.answered[other.addr] || late.missed[other] > 0 {
		t.Error("one that no pod has is known")
	}
}

// The Listener is told once of a router that dies for a pod alone, and once of one that dies for all. A forgotten pod leaves
// nothing.
func TestListener(t *testing.T) {
	var e echoes
	c := nodeOf(&e)
	told := &cluster{}
	calm, unheard := routersAt(1, 2), routersAt(2, 2)
	for _, pod := range []string{"p", "q"} {
		c.sends("ns", pod, groupOf("net/a", calm...), groupOf("net/b", unheard...))
	}
	e.silent, e.asked = nobody, map[netip.Addr]int{}
	c.askOnce(t.Context(), told)
	c.askOnce(t.Context(), told)
	e.deaf = map[netip.Addr]string{unheard[0]: "/p"}
	for range 2 * doubtMisses {
		c.askOnce(t.Context(), told)
	}
	if len(told.egresses) > 0 || !slices.Equal(told.pods, []string{"ns/p"}) {
		t.Errorf("a pod doesn't hear a router: told are Egresses %q and pods %q", told.egresses, told.pods)
	}
	e.silent = func(a netip.Addr) bool { return a == calm[0] }
	for range 2 * doubtMisses {
		c.askOnce(t.Context(), told)
	}
	if !slices.Equal(told.egresses, []string{"net/a"}) {
		t.Errorf("a router is silent: told are Egresses %q", told.egresses)
	}
	routers := []client.Router{{Addr: unheard[0], State: client.RouterLive}, {Addr: unheard[1], State: client.RouterLive}}
	for pod, dead := range map[string]bool{"p": true, "q": false, "new": false} {
		mine := slices.Clone(routers)
		c.Mark(at("ns", pod).ID, "net/b", mine)
		if is := mine[0].State == client.RouterDead; is != dead || mine[1].State != client.RouterLive {
			t.Errorf("pod %s has routers %v", pod, mine)
		}
	}
	c.Forget(at("ns", "p").ID)
	c.Forget(at("ns", "q").ID)
	if c.askOnce(t.Context(), told) || len(c.pods)+len(c.routers) > 0 {
		t.Errorf("left are pods %v and routers %v", c.pods, c.routers)
	}
}
