package egress

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/egress"
	"github.com/coil-net/coil/pkg/plan/gateway"
	"github.com/coil-net/coil/pkg/reconcile"
)

const (
	// askEvery is how often the routers of an Egress are asked.
	askEvery = 30 * time.Second
	// askTimeout is how long all of them together may take to answer, and askedAtOnce how many are asked.
	askTimeout  = 5 * time.Second
	askedAtOnce = 16
	// maxAnswer bounds an answer, and its header, in bytes: any pod may say that it is a router.
	maxAnswer = 4096
)

// answers are the last ones of the ready routers of an Egress.
type answers map[life]gateway.Pressure

// life is one run of a router: its answers say nothing about the next run.
type life struct {
	pod       string
	uid       types.UID
	container string // its ID
}

func lifeOf(pod *corev1.Pod) life {
	l := life{pod: pod.Name, uid: pod.UID}
	for _, s := range pod.Status.ContainerStatuses {
		if s.Name == v2.EgressContainerName {
			l.container = s.ContainerID
		}
	}
	return l
}

// byPod is nil before the routers were asked.
func (a answers) byPod() map[string]gateway.Pressure {
	if a == nil {
		return nil
	}
	out := make(map[string]gateway.Pressure, len(a))
	for l, answer := range a {
		out[l.pod] = answer
	}
	return out
}

// syncPressure asks the ready routers of an Egress how much they use of their connections, ports and limits. Silent
// routers cost other Egresses a bounded time only: a tenant's pods may accept questions and never answer. The former
// answer of a silent router holds: a router whose table of connections is full drops this one, too.
func (c *Controller) syncPressure(ctx context.Context, key types.NamespacedName) error {
	e := c.egresses.Find(key.String())
	if e == nil {
		c.pressures.Delete(key)
		return nil
	}
	before, now := c.pressures.Get(key), answers{}
	round, cancel := context.WithTimeout(ctx, c.askTimeout)
	defer cancel()
	var mu sync.Mutex
	var group errgroup.Group
	group.SetLimit(askedAtOnce)
	for _, pod := range askable(e, c.routers.Under(key.String())) {
		group.Go(func() error {
			at, _ := metricsOf(pod)
			answer, err := ask(round, at)
			known := err == nil
			if err != nil {
				klog.FromContext(ctx).V(4).Info("A router doesn't say how much it uses", "pod", klog.KObj(pod), "reason", err)
				answer, known = before[lifeOf(pod)]
			}
			if known {
				mu.Lock()
				defer mu.Unlock()
				now[lifeOf(pod)] = answer
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	c.pressures.Set(key, now)
	if before == nil || !maps.Equal(before, now) {
		c.objects.Add(key)
	}
	return reconcile.Later(askEvery + rand.N(askEvery/10))
}

// askable returns as many ready routers as the Deployment of an Egress has at most, by name: any pod of the namespace
// may have the labels. Their order is random, so that silent ones don't use up the time of the same others each time.
func askable(e *v2.Egress, routers []*corev1.Pod) []*corev1.Pod {
	ready := slices.DeleteFunc(slices.Clone(routers), func(p *corev1.Pod) bool { _, ok := metricsOf(p); return !ok })
	slices.SortFunc(ready, func(a, b *corev1.Pod) int {
		// Routers that are deleted come on top of those that the Deployment counts.
		return cmp.Or(plan.TrueFirst(a.DeletionTimestamp == nil, b.DeletionTimestamp == nil), strings.Compare(a.Name, b.Name))
	})
	ready = ready[:min(len(ready), egress.MostRouters(e))]
	rand.Shuffle(len(ready), func(i, j int) { ready[i], ready[j] = ready[j], ready[i] })
	return ready
}

// metricsOf returns where a router serves its metrics; false if it isn't ready.
func metricsOf(pod *corev1.Pod) (netip.AddrPort, bool) {
	if !plan.Ready(pod) || len(pod.Status.PodIPs) == 0 {
		return netip.AddrPort{}, false
	}
	addr, err := netip.ParseAddr(pod.Status.PodIPs[0].IP)
	if err != nil {
		return netip.AddrPort{}, false
	}
	for _, c := range pod.Spec.Containers {
		if c.Name == v2.EgressContainerName {
			port, ok := egress.MetricsPortOf(c)
			return netip.AddrPortFrom(addr, port), ok
		}
	}
	return netip.AddrPort{}, false
}

// router is a client of routers, which need no proxy. The context of a question says how long it may take.
var router = http.Client{
	Transport:     &http.Transport{DisableKeepAlives: true, DisableCompression: true, MaxResponseHeaderBytes: maxAnswer},
	CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
}

// ask asks one router.
func ask(ctx context.Context, at netip.AddrPort) (answer gateway.Pressure, err error) {
	url := "http://" + at.String() + gateway.PressurePath
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return answer, err
	}
	resp, err := router.Do(req)
	if err != nil {
		return answer, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return answer, fmt.Errorf("GET %s: %s", url, resp.Status)
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxAnswer)).Decode(&answer); err != nil {
		return answer, fmt.Errorf("GET %s: %w", url, err)
	}
	return answer, nil
}
