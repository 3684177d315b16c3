package egress

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/testkit"
)

// Pods that answer in routers' places, of the same Egress or of one that lists the same routers, keep no
// dead router alive for another pod, and have it marked dead for none that it answers.
func TestPodsLieAboutRouters(t *testing.T) {
	for _, egress := range []string{"a", "b"} {
		for _, liars := range []string{"1", "1 2 3 4 x y z"} {
			t.Run(egress+" "+liars, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					w := newWorld()
					w.direct("10.1.1.1 live, 10.1.1.2 live")
					w.egress("b", "10.96.0.2", "198.51.100.0/24").Spec.Peering = v2.EgressPeeringDirect
					w.routers["net/b"] = w.routers["net/a"]
					w.lying = map[string]bool{}
					m := w.manager(false)
					w.clients(t, m, "p", "q")
					for _, l := range strings.Fields(liars) {
						w.lying["/"+l] = true
						w.pod(l, egress)
						if err := w.add(t, m, l); err != nil {
							t.Fatal(err)
						}
					}
					defer asking(t, m)()
					w.after(t, 30*time.Second, "at first", both)
					w.silence(true, "10.1.1.1")
					w.after(t, 15*time.Second, "a router is silent", second)
					if got := w.has("q"); got != second {
						t.Errorf("q has %q", got)
					}
					w.after(t, 5*time.Minute, "still", second)
					w.silence(false, "10.1.1.1")
					w.after(t, 10*time.Second, "it answers", both)
				})
			})
		}
	}
}

// A pod in which questions take the kernel long delays nobody's judgement of routers.
func TestSlowPods(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.direct("10.1.1.1 live, 10.1.1.2 live")
		m := w.manager(false)
		names := []string{"other/a", "other/z"}
		for i := range 40 {
			names = append(names, fmt.Sprint("other/x", i))
		}
		w.clients(t, m, append(names, "p")...)
		defer asking(t, m)()
		w.after(t, 30*time.Second, "at first", both)
		w.mu.Lock()
		w.slow = map[string]time.Duration{"/other/a": time.Minute, "/other/z": time.Hour}
		w.mu.Unlock()
		w.after(t, 30*time.Second, "others are slow", both)
		for range 3 {
			w.silence(true, "10.1.1.1")
			w.after(t, 15*time.Second, "a router is silent", second)
			w.silence(false, "10.1.1.1")
			w.after(t, 20*time.Second, "it answers", both)
		}
		// They take turns, so that one of them is slow each second.
		turns, end := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(turns)
			for i := 0; ; i++ {
				select {
				case <-end:
					return
				case <-time.After(2100 * time.Millisecond):
				}
				w.mu.Lock()
				w.slow = map[string]time.Duration{"/" + names[i%len(names)]: 2050 * time.Millisecond}
				w.mu.Unlock()
			}
		}()
		time.Sleep(10 * time.Second)
		synctest.Wait()
		asked := w.asks("10.1.1.2")
		w.after(t, time.Minute, "others take turns", both)
		if n := w.asks("10.1.1.2") - asked; n < 50 {
			t.Errorf("a router was asked %d times in a minute", n)
		}
		w.silence(true, "10.1.1.1")
		w.after(t, 5*time.Second, "a router is silent", second)
		w.silence(false, "10.1.1.1")
		close(end)
		<-turns
		w.after(t, time.Minute, "it answers", both) // it has died too often to be believed soon
		// All are slow for a while.
		w.mu.Lock()
		w.slow = map[string]time.Duration{"/other/a": time.Minute, "/other/z": time.Hour, "/p": 10 * time.Minute}
		w.mu.Unlock()
		time.Sleep(15 * time.Minute)
		w.mu.Lock()
		w.slow = nil
		w.mu.Unlock()
		asked = w.asks("10.1.1.2")
		time.Sleep(10 * time.Minute)
		w.after(t, 2*time.Minute, "they are quick again", both)
		if n := w.asks("10.1.1.2") - asked; n < 100 {
			t.Errorf("a router was asked %d times in two minutes", n)
		}
	})
}

// another makes the Egress net/another, which is direct and has the router 10.1.9.9.
func (w *world) another() {
	w.egress("another", "10.96.0.2", "198.51.100.0/24").Spec.Peering = v2.EgressPeeringDirect
	w.routers["net/another"] = []client.Router{{Addr: netip.MustParseAddr("10.1.9.9"), State: client.RouterLive}}
}

// Pods in which questions take long delay nobody's rounds, whether their routers answer or not.
func TestSlowPodsOfOtherEgresses(t *testing.T) {
	for _, answered := range []bool{false, true} {
		for _, takes := range []time.Duration{1900 * time.Millisecond, 2500 * time.Millisecond} {
			t.Run(fmt.Sprint(answered, " ", takes), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					w := newWorld()
					w.patient = true
					w.direct("10.1.1.1 live, 10.1.1.2 live")
					m := w.manager(false)
					w.clients(t, m, "p")
					w.another()
					w.silent[netip.MustParseAddr("10.1.9.9")] = !answered
					w.slow = map[string]time.Duration{}
					for _, pod := range []string{"other/x", "other/y"} {
						w.pod(pod, "another")
						testkit.Check(t, w.add(t, m, pod))
						w.slow["/"+pod] = takes
					}
					defer asking(t, m)()
					w.after(t, 30*time.Second, "at first", both)
					asked := w.asks("10.1.1.2")
					time.Sleep(time.Minute)
					if n := w.asks("10.1.1.2") - asked; n < 50 {
						t.Errorf("a router was asked %d times in a minute", n)
					}
					w.silence(true, "10.1.1.1")
					w.after(t, 5*time.Second, "a router is silent", second)
				})
			})
		}
	}
}

// Pods notice a dead router for which pods of another namespace answer, though a pod of their own namespace is late again
// and again.
func TestMutedAreNotDeceived(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.patient = true
		w.direct("10.1.1.1 live, 10.1.1.2 live")
		m := w.manager(false)
		w.clients(t, m, "p", "late", "liars/x")
		defer asking(t, m)()
		w.after(t, 30*time.Second, "at first", both)
		w.mu.Lock()
		w.slow = map[string]time.Duration{"/late": 1500 * time.Millisecond}
		w.lying = map[string]bool{"/liars/x": true}
		w.mu.Unlock()
		w.after(t, 10*time.Second, "one is late", both)
		w.silence(true, "10.1.1.1")
		w.after(t, 15*time.Second, "a router is silent", second)
	})
}

// A client whose questions took long once notices like others that a router dies.
func TestSlowOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.patient = true
		w.direct("10.1.1.1 live, 10.1.1.2 live")
		m := w.manager(false)
		w.clients(t, m, "p")
		w.another()
		w.pod("q", "another")
		testkit.Check(t, w.add(t, m, "q"))
		defer asking(t, m)()
		w.after(t, 30*time.Second, "at first", both)
		slow := func(d time.Duration) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.slow = map[string]time.Duration{"/p": d}
		}
		time.Sleep(time.Second / 2)
		slow(2100 * time.Millisecond)
		time.Sleep(time.Second)
		slow(0)
		time.Sleep(5 * time.Second)
		w.silence(true, "10.1.1.1")
		w.after(t, 6*time.Second, "a router is silent", second)
	})
}

// Pods in which work takes long don't keep the node from those of other namespaces, however many there are and however
// long it takes.
func TestSlowPodsKeepNobody(t *testing.T) {
	for _, takes := range []time.Duration{time.Second, 5 * time.Second, time.Hour} {
		t.Run(takes.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld()
				w.egress("a", "10.96.0.1", "192.0.2.0/24")
				m := w.manager(false)
				var slow []string
				for i := range 60 {
					slow = append(slow, fmt.Sprintf("slow%d/p%d", i%3, i))
				}
				w.clients(t, m, append(slow, "p")...)
				defer running(t, m)()
				w.after(t, time.Second, "at first", "192.0.2.0/24 10.96.0.1")
				w.mu.Lock()
				w.slow = map[string]time.Duration{}
				for _, s := range slow {
					w.slow["/"+s] = takes
				}
				w.slow["/p"] = time.Millisecond
				w.mu.Unlock()
				for i := range mostPods + 100 { // pods that have ended, or were never started
					m.PodChanged(types.NamespacedName{Namespace: "slow0", Name: fmt.Sprint("none", i)})
				}
				for i := range 20 {
					service := fmt.Sprintf("10.96.1.%d", i)
					w.change(m, func() { w.egress("a", service, "192.0.2.0/24") })
					w.after(t, time.Second, "changed to "+service, "192.0.2.0/24 "+service)
					time.Sleep(7 * time.Second)
				}
			})
		})
	}
}

// Pods whose answers get lost, as by rules of their own, neither keep a router dead for others nor make it so.
func TestMutePods(t *testing.T) {
	for _, mute := range []string{"a", "z", "a b", "a z"} {
		t.Run(mute, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld()
				w.direct("10.1.1.1 live, 10.1.1.2 live")
				m := w.manager(false)
				w.clients(t, m, append(strings.Fields(mute), "p")...)
				defer asking(t, m)()
				w.after(t, 30*time.Second, "at first", both)
				w.mu.Lock()
				for _, pod := range strings.Fields(mute) {
					w.unlisted["/"+pod] = true
				}
				w.mu.Unlock()
				for range 60 {
					w.after(t, time.Second, "others are mute", both)
				}
				for range 3 { // it dies again soon
					w.silence(true, "10.1.1.1")
					w.after(t, 15*time.Second, "a router is silent", second)
					w.silence(false, "10.1.1.1")
					w.after(t, 20*time.Second, "it answers", both)
				}
			})
		})
	}
}

// asks is how often a router was asked.
func (w *world) asks(router string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.asked[netip.MustParseAddr(router)]
}
