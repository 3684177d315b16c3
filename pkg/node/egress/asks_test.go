package egress

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/clientnet"
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

// sends makes a pod one that has tunnels to all routers of groups.
func (m *Manager) sends(namespace, pod string, groups ...client.Group) *sandbox {
	id := attachment.ID{ContainerID: "c-" + pod, IfName: "eth0"}
	s := &sandbox{Sandbox: node.Sandbox{ID: id, Pod: store.Pod{Namespace: namespace, Name: pod}, Netns: store.Netns{Path: "/" + pod}}}
	s.groups, s.links = groups, map[netip.Addr]int{}
	for _, g := range groups {
		for _, a := range g.Routers() {
			s.links[a] = 1 + len(s.links)
		}
	}
	m.known[id] = s
	return s
}

// attack makes pods of a namespace clients of Egresses of their own, with as many routers as a pod may have.
func (m *Manager) attack(namespace string, pods int) (all []*sandbox) {
	for p := range pods {
		var groups []client.Group
		for e := range 8 {
			groups = append(groups, groupOf(fmt.Sprintf("%s/%d-%d", namespace, p, e), routersAt(100+8*p+e, client.MostTunnels/8)...))
		}
		all = append(all, m.sends(namespace, fmt.Sprintf("%s-%d", namespace, p), groups...))
	}
	return all
}

// deadOf returns which of some routers are dead.
func (m *Manager) deadOf(addrs []netip.Addr) (dead []netip.Addr, n int) {
	for key, r := range m.routers {
		if r.dead && slices.Contains(addrs, key.addr) {
			dead = append(dead, key.addr)
		}
	}
	return dead, len(dead)
}

// waits returns how long somebody who wants Manager.mu again and again has to wait for it in all while f runs.
func (m *Manager) waits(f func()) (waited time.Duration) {
	var done atomic.Bool
	end := make(chan time.Duration)
	go func() {
		var sum time.Duration
		for !done.Load() {
			began := time.Now()
			m.mu.Lock()
			sum += time.Since(began)
			m.mu.Unlock()
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
	asked  map[netip.Addr]int
	total  int
	twice  []string // who asks a router twice at once
}

func (e *echoes) ask(_ context.Context, at store.Netns, _ time.Duration, questions []echo.Question) (answers []echo.Answer, err error) {
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
		if e.silent(q.To) {
			answer = echo.Missing
		}
		answers = append(answers, answer)
	}
	return answers, nil
}

// round asks once, and returns how often each router was asked, and all together.
func (e *echoes) round(t *testing.T, m *Manager, silent func(netip.Addr) bool) (asked map[netip.Addr]int, total int) {
	t.Helper()
	e.silent, e.asked, e.total, e.twice = silent, map[netip.Addr]int{}, 0, nil
	m.cfg.Ask = e.ask
	m.askOnce(klog.NewContext(t.Context(), klog.Logger{})) // thousands of routers die
	if len(e.twice) > 0 {
		t.Errorf("routers are asked twice at once: %s", few(e.twice, ", "))
	}
	return e.asked, e.total
}

func all(netip.Addr) bool    { return true }
func nobody(netip.Addr) bool { return false }

// ADD, DEL and failover of a node wait little for who asks, however many routers never answer.
func TestRoutersThatNeverAnswerStallNobody(t *testing.T) {
	m := newWorld().manager(false)
	m.attack("loud", 30)
	var e echoes
	var least time.Duration
	limit := testkit.Limit(50 * time.Millisecond)
	for round := range 10 { // another process may have the processor
		waited := m.waits(func() { e.round(t, m, all) })
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
	m := newWorld().manager(false)
	calm, calmGroup := routersAt(1, 4), groupOf("calm/a", routersAt(1, 4)...)
	pods := m.attack("loud", 20)
	for _, s := range pods {
		m.sends(s.Namespace, s.Name, append(s.groups[1:], calmGroup)...)
	}
	m.sends("calm", "calm", calmGroup)
	isLoud := func(a netip.Addr) bool { return !slices.Contains(calm, a) }
	var e echoes
	known := map[netip.Addr]bool{}
	missed := map[netip.Addr]int{}
	for round := range 20 {
		silent := nobody
		if round >= 5 {
			silent = isLoud
		}
		waited := map[routerKey]int{}
		for key, r := range m.routers {
			waited[key] = r.waited
		}
		asked, total := e.round(t, m, silent)
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
		if n := len(known); round == 4 && n != len(m.routers) {
			t.Errorf("%d of %d routers were asked in five rounds", n, len(m.routers))
		}
		for key, r := range m.routers {
			if n := asked[key.addr]; n == 0 && r.waited != waited[key]+1 || n > 0 && round < 5 && r.waited != 0 {
				t.Fatalf("round %d: router %s was asked %d times and has waited for %d rounds, before %d", round, key.addr, n, r.waited, waited[key])
			}
			if r.missed > missed[key.addr] {
				t.Fatalf("round %d: router %s has missed %d questions of %d", round, key.addr, r.missed, missed[key.addr])
			}
		}
	}
	for key, r := range m.routers {
		if r.dead != isLoud(key.addr) {
			t.Errorf("router %s of %s: dead is %t after 15 rounds", key.addr, key.egress, r.dead)
		}
	}
	for round := range deathMisses {
		if _, dead := m.deadOf(calm); dead > 0 {
			t.Errorf("dead after %d rounds", round)
		}
		e.round(t, m, func(a netip.Addr) bool { return isLoud(a) || a == calm[0] })
	}
	if addrs, dead := m.deadOf(calm); dead != 1 || addrs[0] != calm[0] {
		t.Errorf("%v are dead, want %s", addrs, calm[0])
	}
}

// A node whose tenants mean well asks all there is to ask, also when all routers die at once, or many come back.
func TestQuestionsOfHonestNodes(t *testing.T) {
	const pods, egresses = 100, 64
	m := newWorld().manager(false)
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
		s := m.sends("ns", fmt.Sprint(p), groups...)
		for a := range s.links {
			s.heard(routerKey{addr: a}, true)
		}
	}
	routers := egresses * 4 * 2
	var e echoes
	quarter := func(a netip.Addr) bool { b := a.As16(); return b[15] == 0 }
	for _, phase := range []struct {
		what   string
		rounds int
		silent func(netip.Addr) bool
		least  int
	}{{"all answer", 2, nobody, routers}, {"none does", 10, all, deathMisses * routers}, {"they do", 5, nobody, routers}, {"a quarter doesn't", 10, quarter, routers},
		{"it is silent for long", 1, quarter, routers}, {"it comes back", 10, nobody, pods * routers / 4}} {
		if phase.what == "it is silent for long" {
			for _, s := range m.known {
				for key := range m.routers {
					if quarter(key.addr) {
						s.missed[key] = deathMisses
					}
				}
			}
		}
		most := 0
		for range phase.rounds {
			_, total := e.round(t, m, phase.silent)
			most = max(most, total)
			if m.asker.late {
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
	m := newWorld().manager(false)
	g := groupOf("net/a", routersAt(1, 2)...)
	m.sends("ns", "p", groupOf("net/a", g.Members[0]))
	late := m.sends("ns", "late")
	var e echoes
	e.round(t, m, nobody)
	old := routerKey{"net/a", g.Members[1]}
	m.routers[old] = &router{liveness: deadAlready()}
	other := routerKey{"net/a", routersAt(1, 3)[2]}
	m.routers[other] = &router{liveness: deadAlready()}
	late.heard(other, true)
	late.heard(other, false)
	senders := m.senders()
	state := client.State{Groups: []client.Group{{Egress: "net/a", Direct: true, Members: g.Members[:1], Dead: g.Members[1:]}}}
	m.made(t.Context(), late, clientnet.Outcome{State: state, Links: map[netip.Addr]int{g.Members[0]: 1, g.Members[1]: 2}}, nil)
	a := gather(senders)
	m.meet(a)
	m.forgetRouters(a)
	if r := m.routers[old]; r == nil || !r.dead {
		t.Error("it is forgotten though a pod has it")
	}
	if m.routers[other] != nil || late.answered[other.addr] || late.missed[other] > 0 {
		t.Error("one that no pod has is known")
	}
}
