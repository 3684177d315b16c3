package apiserver

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

func TestControllerAnswersRequests(t *testing.T) {
	c := ipamCluster(t)
	c.pool(t, "default", 5, dual("10.1.0.0/20", "fd00:1::/116"))
	c.pool(t, "small", 0, v4("10.2.0.0/24"))
	var nodes []*corev1.Node
	for i := range 10 {
		nodes = append(nodes, c.node(t, fmt.Sprintf("node-%d", i)))
	}
	c.run(t, c.serviceAccount(t), options())
	var requests []string
	for i := range 200 {
		name := fmt.Sprintf("r-%d", i)
		c.ask(t, name, nodes[i%len(nodes)], []string{"default", "small"}[i%2])
		requests = append(requests, name)
	}
	c.requireOneBlockEach(t, 60*time.Second, requests...)

	t.Run("a block says all about itself", func(t *testing.T) {
		r := c.answer(t, "r-0")
		b := c.block(t, r.Status.AddressBlockName)
		p := testkit.Must(c.coil.CoilV2().AddressPools().Get(t.Context(), "default", metav1.GetOptions{}))(t)
		if b.Labels[v2.LabelPool] != "default" || b.Labels[v2.LabelNode] != "node-0" || b.Labels[v2.LabelRequest] != string(r.UID) {
			t.Errorf("labels are %v", b.Labels)
		}
		if b.Annotations[v2.AnnotationNodeUID] != string(nodes[0].UID) {
			t.Errorf("annotations are %v, want the UID %s of the Node", b.Annotations, nodes[0].UID)
		}
		if len(b.Finalizers) != 1 || b.Finalizers[0] != v2.Finalizer {
			t.Errorf("finalizers are %q", b.Finalizers)
		}
		if o := metav1.GetControllerOf(b); o == nil || o.UID != p.UID || o.BlockOwnerDeletion == nil || !*o.BlockOwnerDeletion {
			t.Errorf("owners are %+v, want the pool as controller", b.OwnerReferences)
		}
		if b.Name != fmt.Sprintf("default-%d", b.Index) || b.IPv4 == nil || b.IPv6 == nil {
			t.Errorf("block %s has index %d, ranges %v and %v", b.Name, b.Index, b.IPv4, b.IPv6)
		}
		if len(r.Status.Conditions) != 1 || r.Status.Conditions[0].Type != v2.BlockRequestComplete {
			t.Errorf("conditions are %+v", r.Status.Conditions)
		}
	})
	t.Run("the pool counts its blocks and addresses", func(t *testing.T) {
		for _, b := range []string{"default-3", "default-4"} {
			_, err := c.coil.CoilV2().AddressBlocks().Patch(t.Context(), b, types.MergePatchType, []byte(`{"status":{"allocated":7,"cooling":1}}`), metav1.PatchOptions{}, "status")
			if err != nil {
				t.Fatal(err)
			}
		}
		testkit.Eventually(t, 10*time.Second, "status of the pool", func() error {
			p, err := c.coil.CoilV2().AddressPools().Get(t.Context(), "default", metav1.GetOptions{})
			if err != nil {
				return err
			}
			st := p.Status
			if st.Blocks.Summary != "100/128" || st.Addresses.Summary != "14/4096" || st.LastIndex == nil || *st.LastIndex != 99 || st.ObservedGeneration != p.Generation {
				return fmt.Errorf("status is %+v", st)
			}
			return nil
		})
	})
	t.Run("a returned block is carved last", func(t *testing.T) {
		first := c.block(t, "default-5")
		if err := c.drop(t.Context(), first); err != nil {
			t.Fatal(err)
		}
		c.ask(t, "again", nodes[1], "default")
		if r := c.answer(t, "again"); r.Status.AddressBlockName != "default-100" {
			t.Errorf("the next block is %s, want default-100", r.Status.AddressBlockName)
		}
	})
}

func TestControllerRefuses(t *testing.T) {
	c := ipamCluster(t)
	n := c.node(t, "node")
	other := c.node(t, "other")
	c.pool(t, "full", 4, v4("10.3.0.0/28"))
	c.pool(t, "going", 4, v4("10.4.0.0/24"))
	c.run(t, c.serviceAccount(t), options())
	c.ask(t, "first-full", n, "full")
	c.ask(t, "first-going", n, "going")
	if r := c.answer(t, "first-full"); r.Status.AddressBlockName != "full-0" {
		t.Fatalf("the first request got %+v", r.Status)
	}
	if r := c.answer(t, "first-going"); r.Status.AddressBlockName != "going-0" {
		t.Fatalf("the first request got %+v", r.Status)
	}
	if err := c.coil.CoilV2().AddressPools().Delete(t.Context(), "going", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	unknown := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "nowhere", UID: "0"}}
	before := other.DeepCopy()
	before.UID = "of-an-earlier-node"
	for _, tt := range []struct {
		name, pool    string
		node          *corev1.Node
		reason, words string
	}{
		{"terminating", "going", n, v2.ReasonPoolTerminating, "is being deleted"},
		{"exhausted", "full", n, v2.ReasonPoolExhausted, "append a subnet"},
		{"unknown pool", "nope", n, v2.ReasonPoolNotFound, "create it, or change the annotation coil.cybozu.com/pool"},
		{"unknown node", "full", unknown, v2.ReasonNodeNotFound, "no Node nowhere"},
		{"node made again", "full", before, v2.ReasonNodeNotFound, "made again"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			name := fresh("refused")
			c.ask(t, name, tt.node, tt.pool)
			got := failed(c.answer(t, name))
			if got == nil || got.Reason != tt.reason || !strings.Contains(got.Message, tt.words) {
				t.Errorf("answer is %+v, want reason %s and a message with %q", got, tt.reason, tt.words)
			}
		})
	}
	if n := len(c.blocksOf(t, "full")) + len(c.blocksOf(t, "going")); n != 2 {
		t.Errorf("there are %d blocks, want the first two only", n)
	}
	t.Run("an Event tells the node", func(t *testing.T) {
		testkit.Eventually(t, 10*time.Second, "Event", func() error {
			es, err := c.core.EventsV1().Events(metav1.NamespaceDefault).List(t.Context(), metav1.ListOptions{FieldSelector: "regarding.kind=Node,regarding.name=node,reason=" + v2.ReasonPoolExhausted})
			if err != nil {
				return err
			}
			if len(es.Items) == 0 {
				return errors.New("there is none")
			}
			return nil
		})
	})
	t.Run("a node gets a block when one is back", func(t *testing.T) {
		b := c.block(t, "full-0")
		if err := c.drop(t.Context(), b); err != nil {
			t.Fatal(err)
		}
		// The controller may not have heard of it yet; coild asks again, too.
		testkit.Eventually(t, 10*time.Second, "a block of the pool", func() error {
			name := fresh("retry")
			c.ask(t, name, other, "full")
			if r := c.answer(t, name); r.Status.AddressBlockName != "full-0" {
				return fmt.Errorf("answer is %+v", r.Status)
			}
			return nil
		})
	})
}

// A pool that is deleted in the middle of a burst gives nothing to requests made
// after that, and goes when the last of its blocks has gone.
func TestControllerPoolDeletedWhileCarving(t *testing.T) {
	c := ipamCluster(t)
	n := c.node(t, "node")
	for round := range 5 {
		pool := fmt.Sprintf("pool-%d", round)
		c.pool(t, pool, 0, v4(fmt.Sprintf("10.5.%d.0/24", round)))
	}
	c.run(t, c.serviceAccount(t), options())
	for round := range 5 {
		pool := fmt.Sprintf("pool-%d", round)
		for i := range 20 {
			c.ask(t, fmt.Sprintf("%s-before-%d", pool, i), n, pool)
		}
		if err := c.coil.CoilV2().AddressPools().Delete(t.Context(), pool, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		c.ask(t, pool+"-after", n, pool)
		if got := failed(c.answer(t, pool+"-after")); got == nil || got.Reason != v2.ReasonPoolTerminating && got.Reason != v2.ReasonPoolNotFound {
			t.Errorf("a request made after the deletion of its pool got %+v", got)
		}
		for i := range 20 {
			r := c.answer(t, fmt.Sprintf("%s-before-%d", pool, i))
			if r.Status.AddressBlockName == "" {
				continue
			}
			if _, err := c.coil.CoilV2().AddressPools().Get(t.Context(), pool, metav1.GetOptions{}); err != nil {
				t.Fatalf("pool %s has block %s but is gone: %v", pool, r.Status.AddressBlockName, err)
			}
		}
		bs := c.blocksOf(t, pool)
		if len(bs) > 0 {
			testkit.Eventually(t, 10*time.Second, "the pool says what it waits for", func() error {
				got, err := c.condition(t, pool, v2.PoolTerminating)
				if err == nil && (got.Status != metav1.ConditionTrue || !strings.Contains(got.Message, "held by node;") || !strings.HasPrefix(got.Message, fmt.Sprint(len(bs)))) {
					err = fmt.Errorf("condition is %+v with %d blocks", got, len(bs))
				}
				return err
			})
			for _, b := range bs {
				c.requireDeleting(t, b.Name) // its node takes no new address from it
			}
		}
		for i := range bs {
			if err := c.drop(t.Context(), &bs[i]); err != nil {
				t.Fatal(err)
			}
		}
		testkit.Eventually(t, 10*time.Second, "end of "+pool, func() error {
			p, err := c.coil.CoilV2().AddressPools().Get(t.Context(), pool, metav1.GetOptions{})
			if err == nil {
				return fmt.Errorf("it has finalizers %q and status %+v", p.Finalizers, p.Status)
			}
			return nil
		})
	}
}

// Two leaders answer all requests at once. Which of two blocks is the answer is decided
// by the request; the other one goes.
func TestControllerTwoLeaders(t *testing.T) {
	c := ipamCluster(t)
	c.pool(t, "default", 2, dual("10.6.0.0/20", "fd00:6::/116"))
	n := c.node(t, "node")
	c.fakeCoilds(t)
	c.run(t, c.serviceAccount(t), options())
	// Another namespace has another lease.
	o := options()
	o.Election.Namespace = metav1.NamespaceDefault
	c.allowLeases(t, o.Election.Namespace)
	c.run(t, c.serviceAccount(t), o)
	for _, ns := range []string{"kube-system", "default"} {
		testkit.Eventually(t, 20*time.Second, "a leader in "+ns, func() error {
			_, err := c.core.CoordinationV1().Leases(ns).Get(t.Context(), "coil-ipam-leader", metav1.GetOptions{})
			return err
		})
	}
	var requests []string
	for i := range 300 {
		name := fmt.Sprintf("r-%d", i)
		c.ask(t, name, n, "default")
		requests = append(requests, name)
	}
	c.requireOneBlockEach(t, 60*time.Second, requests...)
}

// allowLeases gives coil-ipam-controller the right to lead in a namespace.
func (c *cluster) allowLeases(t *testing.T, ns string) {
	t.Helper()
	name := fresh("leases")
	testkit.Must(c.core.RbacV1().Roles(ns).Create(t.Context(), &rbacv1.Role{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Rules:      []rbacv1.PolicyRule{{APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, Verbs: []string{"*"}}},
	}, metav1.CreateOptions{}))(t)
	testkit.Must(c.core.RbacV1().RoleBindings(ns).Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		RoleRef:    rbacv1.RoleRef{APIGroup: "rbac.authorization.k8s.io", Kind: "Role", Name: name},
		Subjects:   []rbacv1.Subject{{Kind: "ServiceAccount", Name: "coil-ipam-controller", Namespace: "kube-system"}},
	}, metav1.CreateOptions{}))(t)
}

// errKilled is what a killed process would have got to see: nothing.
var errKilled = errors.New("killed")

// The program dies between the two writes of an answer, again and again: 200 times in the
// long form, which the environment variable COIL_CRASH=long asks for.
func TestControllerKilledBetweenBlockAndStatus(t *testing.T) {
	kills := testkit.CrashForm.Times(10, 200)
	c := ipamCluster(t)
	c.pool(t, "default", 0, v4("10.7.0.0/21"))
	n := c.node(t, "node")
	var requests []string
	for round := range kills {
		// Several at once, so that it dies in the middle of all kinds of work.
		for i := range 4 {
			name := fmt.Sprintf("r-%d-%d", round, i)
			c.ask(t, name, n, "default")
			requests = append(requests, name)
		}
		var dead atomic.Bool
		died := make(chan struct{})
		die := sync.OnceFunc(func() { dead.Store(true); close(died) })
		cfg := intercept(c.serviceAccount(t), func(r *http.Request, next http.RoundTripper) (*http.Response, error) {
			if dead.Load() && !strings.Contains(r.URL.Path, "/leases") {
				return nil, errKilled
			}
			resp, err := next.RoundTrip(r)
			if isWrite(r, http.MethodPost, "addressblocks") && err == nil && resp.StatusCode == http.StatusCreated {
				resp.Body.Close()
				die()
				return nil, errKilled
			}
			return resp, err
		})
		stop := c.run(t, cfg, options())
		select {
		case <-died:
		case <-time.After(testkit.Timeout(20 * time.Second)):
			t.Fatal("the program carves no block")
		}
		stop()
	}
	c.run(t, c.serviceAccount(t), options())
	c.requireOneBlockEach(t, 30*time.Second, requests...)
}

// The answer to each second create is lost although the block was created.
func TestControllerLostAnswers(t *testing.T) {
	c := ipamCluster(t)
	c.pool(t, "default", 0, v4("10.8.0.0/24"))
	n := c.node(t, "node")
	var creates atomic.Int64
	c.run(t, intercept(c.serviceAccount(t), func(r *http.Request, next http.RoundTripper) (*http.Response, error) {
		resp, err := next.RoundTrip(r)
		if err == nil && (isWrite(r, http.MethodPost, "addressblocks") || isWrite(r, http.MethodPut, "blockrequests")) && creates.Add(1)%2 == 0 {
			resp.Body.Close()
			return nil, errors.New("connection reset")
		}
		return resp, err
	}), options())
	var requests []string
	for i := range 100 {
		name := fmt.Sprintf("r-%d", i)
		c.ask(t, name, n, "default")
		requests = append(requests, name)
	}
	c.requireOneBlockEach(t, 60*time.Second, requests...)
}

// The cache of blocks is late by seconds, while others take blocks too.
func TestControllerStaleCache(t *testing.T) {
	c := ipamCluster(t)
	p := c.pool(t, "default", 0, v4("10.9.0.0/24"))
	n := c.node(t, "node")
	var live atomic.Bool
	c.run(t, intercept(c.serviceAccount(t), func(r *http.Request, next http.RoundTripper) (*http.Response, error) {
		resp, err := next.RoundTrip(r)
		if err == nil && live.Load() && strings.Contains(r.URL.Path, "/addressblocks") && r.URL.Query().Get("watch") != "" {
			resp.Body.Close()
			return nil, errors.New("no watch today")
		}
		if err == nil && strings.Contains(r.URL.Path, "/addressblocks") && r.URL.Query().Get("watch") != "" {
			resp.Body = &stoppableBody{resp.Body, &live}
		}
		return resp, err
	}), options())
	c.ask(t, "first", n, "default")
	c.answer(t, "first")
	live.Store(true) // from here on, nothing new arrives
	for i := range int32(40) {
		// Every second index ahead is taken by others.
		name := fmt.Sprintf("default-%d", 2*i+1)
		b := &v2.AddressBlock{
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{v2.LabelPool: "default", v2.LabelNode: "other"}, Finalizers: []string{v2.Finalizer},
				OwnerReferences: []metav1.OwnerReference{{APIVersion: "coil.cybozu.com/v2", Kind: "AddressPool", Name: p.Name, UID: p.UID}}},
			Index: 2*i + 1, IPv4: new(fmt.Sprintf("10.9.0.%d/32", 2*i+1)),
		}
		testkit.Must(c.coil.CoilV2().AddressBlocks().Create(t.Context(), b, metav1.CreateOptions{}))(t)
	}
	seen := map[string]bool{}
	for i := range 60 {
		name := fmt.Sprintf("r-%d", i)
		c.ask(t, name, n, "default")
		block := c.answer(t, name).Status.AddressBlockName
		if block == "" || seen[block] {
			t.Fatalf("request %d was answered with %q", i, block)
		}
		seen[block] = true
		if b := c.block(t, block); b.Labels[v2.LabelNode] != "node" {
			t.Fatalf("request %d was answered with block %s of node %s", i, block, b.Labels[v2.LabelNode])
		}
	}
}
