package migrate

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	coilfake "github.com/coil-net/coil/generated/clientset/versioned/fake"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/coilv1"
)

// data are those of one pool, whose only pod with an address is on n1.
func data() []coilv1.Entry {
	return []coilv1.Entry{
		{Key: "pool/app", Value: []byte(`{"subnets":["10.1.0.0/28"],"block_size":2}`)},
		{Key: "subnet/10.1.0.0"},
		{Key: "block/app/10.1.0.0", Value: []byte(`{"free":["10.1.0.8/29"],"nodes":{"n1":["10.1.0.4/30"],"n2":["10.1.0.0/30"]}}`)},
		{Key: "ip/10.1.0.4/1", Value: []byte("app/web")},
	}
}

const wantYAML = `# The data of Coil v1 in etcd, revision 7: 1 pools, and 1 blocks with 1 addresses in use.
---
apiVersion: coil.cybozu.com/v2
kind: AddressPool
metadata:
  name: app
spec:
  blockSizeBits: 2
  subnets:
  - ipv4: 10.1.0.0/28
---
apiVersion: coil.cybozu.com/v2
index: 1
ipv4: 10.1.0.4/30
kind: AddressBlock
metadata:
  finalizers:
  - coil.cybozu.com
  labels:
    coil.cybozu.com/node: n1
    coil.cybozu.com/pool: app
    coil.cybozu.com/reserved: "true"
  name: app-1
`

// v1 returns the objects of Coil v1 on one node, with its pods, and the namespace of the pool.
func v1() []runtime.Object {
	in := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: "kube-system", Name: name} }
	pod := func(name, kind, owner string) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: in(name), Spec: corev1.PodSpec{NodeName: "n1"}}
		p.OwnerReferences = []metav1.OwnerReference{{Kind: kind, Name: owner, Controller: new(true)}}
		return p
	}
	all := []runtime.Object{
		&appsv1.DaemonSet{ObjectMeta: in("coil-node")}, &appsv1.Deployment{ObjectMeta: in("coil-controllers")},
		&corev1.ConfigMap{ObjectMeta: in("coil-config")},
		pod("coil-node-x", "DaemonSet", "coil-node"), pod("coil-controllers-5d9-y", "ReplicaSet", "coil-controllers-5d9"),
		pod("coild-z", "DaemonSet", "coild"), pod("coil-controllers-old", "ReplicaSet", "coil-controllers"),
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "app"}}, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default"}},
	}
	for _, name := range []string{"coil-node", "coil-controllers"} {
		all = append(all, &corev1.ServiceAccount{ObjectMeta: in(name)},
			&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name}}, &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: name}})
	}
	return all
}

// lab is a Dump on fake clients, and the changes that it makes, in order.
type lab struct {
	Dump
	kube    *fake.Clientset
	log     bytes.Buffer
	entries []coilv1.Entry
	changes []string
	written string
	// podsEnd is how long after their owner v1's pods are gone; negative for never.
	podsEnd time.Duration
	failAt  int // number of the change that fails; 0 for none
}

var errKilled = errors.New("killed")

// change records a change, unless it is the one that fails.
func (l *lab) change(what string) error {
	if l.failAt == len(l.changes)+1 {
		l.failAt = 0
		return errKilled
	}
	l.changes = append(l.changes, what)
	return nil
}

func newLab(kube, coil []runtime.Object) *lab {
	l := &lab{kube: fake.NewClientset(kube...), entries: data()}
	l.Cluster = Cluster{Kube: l.kube, Coil: coilfake.NewSimpleClientset(coil...), Log: &l.log}
	l.Timeout = time.Minute
	l.Read = func(context.Context) ([]coilv1.Entry, int64, error) { return l.entries, 7, nil }
	l.Check = func() error { return nil }
	l.Write = func(text []byte) error {
		l.written = string(text)
		return l.change("write")
	}
	l.kube.PrependReactor("*", "*", func(a k8stesting.Action) (bool, runtime.Object, error) {
		switch a := a.(type) {
		case k8stesting.DeleteAction:
			if _, err := l.kube.Tracker().Get(a.GetResource(), a.GetNamespace(), a.GetName()); err != nil {
				return true, nil, err
			}
			if err := l.change("delete " + a.GetResource().Resource + " " + a.GetName()); err != nil {
				return true, nil, err
			}
			if pod, ok := map[string]string{"daemonsets": "coil-node-x", "deployments": "coil-controllers-5d9-y"}[a.GetResource().Resource]; ok && l.podsEnd >= 0 {
				time.AfterFunc(l.podsEnd, func() {
					// It may be gone: the change was made in an earlier run.
					_ = l.kube.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("pods"), "kube-system", pod)
				})
			}
		case k8stesting.PatchAction:
			if err := l.change("annotate " + a.GetName()); err != nil {
				return true, nil, err
			}
		}
		return false, nil, nil
	})
	return l
}

var allChanges = []string{
	"delete daemonsets coil-node", "delete deployments coil-controllers",
	"delete configmaps coil-config",
	"delete clusterrolebindings coil-node", "delete clusterroles coil-node", "delete serviceaccounts coil-node",
	"delete clusterrolebindings coil-controllers", "delete clusterroles coil-controllers", "delete serviceaccounts coil-controllers",
	"write", "annotate app",
}

func (l *lab) want(t *testing.T, changes []string) {
	t.Helper()
	if !slices.Equal(l.changes, changes) {
		t.Errorf("changes are\n%s\nwant\n%s\nlog:\n%s", strings.Join(l.changes, "\n"), strings.Join(changes, "\n"), l.log.String())
	}
}

func TestDump(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLab(v1(), nil)
		l.podsEnd = 5 * time.Second
		if err := l.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		if l.written != wantYAML {
			t.Errorf("YAML:\n%s\nwant\n%s", l.written, wantYAML)
		}
		ns, err := l.kube.CoreV1().Namespaces().Get(t.Context(), "app", metav1.GetOptions{})
		if err != nil || ns.Annotations[v2.AnnotationPool] != "app" {
			t.Errorf("namespace app: %v, annotations %v", err, ns.Annotations)
		}
		if !strings.Contains(l.log.String(), "Waiting for the end of coil-controllers-5d9-y on n1, coil-node-x on n1\n") {
			t.Errorf("the log doesn't say that it waits:\n%s", l.log.String())
		}
		l.want(t, allChanges)
	})
}

// Data are read after v1's pods have ended: whatever they wrote until then counts.
func TestDumpReadsLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLab(v1(), nil)
		l.podsEnd = 5 * time.Second
		l.Read = func(context.Context) ([]coilv1.Entry, int64, error) {
			if len(l.changes) > 0 {
				return append(l.entries, coilv1.Entry{Key: "ip/10.1.0.0/3", Value: []byte("app/late")}), 8, nil
			}
			return l.entries, 7, nil
		}
		if err := l.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(l.written, "name: app-0\n") {
			t.Errorf("the block of the last pod is missing:\n%s", l.written)
		}
	})
}

// The ConfigMap of a Coil that is installed already isn't v1's.
func TestDumpBesideCoil(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLab(append(v1(), &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "coild"}}), nil)
		if err := l.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		l.want(t, slices.Delete(slices.Clone(allChanges), 2, 3))
	})
}

// Whatever step it was killed at, the next run ends with the same.
func TestDumpKilled(t *testing.T) {
	for n := range allChanges {
		synctest.Test(t, func(t *testing.T) {
			l := newLab(v1(), nil)
			l.failAt = n + 1
			err := l.Run(t.Context())
			if !errors.Is(err, errKilled) {
				t.Fatalf("change %d: %v", n+1, err)
			}
			did := fmt.Sprintf("%d objects of Coil v1 were deleted, no YAML was written: run dump again", n)
			switch allChanges[n] {
			case "delete daemonsets coil-node":
				did = "this run deleted nothing, no YAML was written: run dump again"
			case "delete deployments coil-controllers":
				did = "1 object of Coil v1 was deleted, no YAML was written: run dump again"
			case "write":
				did = "Coil v1 was deleted, no YAML was written: run dump again"
			case "annotate app":
				did = "Coil v1 was deleted, the YAML was written: run dump again"
			}
			if !strings.HasSuffix(err.Error(), did) {
				t.Errorf("change %d: error %v doesn't end with %q", n+1, err, did)
			}
			if err := l.Run(t.Context()); err != nil {
				t.Fatalf("change %d: again: %v", n+1, err)
			}
			if l.written != wantYAML {
				t.Errorf("change %d: YAML:\n%s", n+1, l.written)
			}
			changes := slices.Clone(l.changes)
			if n == len(allChanges)-1 { // it was written before, too
				changes = slices.Delete(changes, n, n+1)
			}
			if !slices.Equal(changes, allChanges) {
				t.Errorf("change %d: changes are %v", n+1, l.changes)
			}
		})
	}
}

func TestDumpDryRun(t *testing.T) {
	l := newLab(v1(), nil)
	l.DryRun = true
	if err := l.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	l.want(t, []string{"write"})
	for _, want := range append(slices.Clone(allChanges[:9]), "annotate") {
		fields := strings.Fields(want)
		if name := fields[len(fields)-1]; !strings.Contains(l.log.String(), " "+name) {
			t.Errorf("the log doesn't have %s:\n%s", name, l.log.String())
		}
	}
	if got := strings.Count(l.log.String(), "Would "); got != 11 {
		t.Errorf("%d lines say what would be done, want 11:\n%s", got, l.log.String())
	}
	if l.written != wantYAML {
		t.Errorf("YAML:\n%s", l.written)
	}
	if log := l.log.String(); !strings.Contains(log, "Would write 1 AddressPools") || strings.Contains(log, "Wrote") {
		t.Errorf("the log says that something was written:\n%s", log)
	}
}

func TestDumpSkipsUninstall(t *testing.T) {
	l := newLab([]runtime.Object{&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "app"}}}, nil)
	l.SkipUninstall = true
	if err := l.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	l.want(t, []string{"write", "annotate app"})
}

// Nothing is changed when something is wrong.
func TestDumpRefuses(t *testing.T) {
	pool := func(cidr string) *v2.AddressPool {
		return &v2.AddressPool{ObjectMeta: metav1.ObjectMeta{Name: "app"}, Spec: v2.AddressPoolSpec{BlockSizeBits: 2, Subnets: []v2.SubnetSet{{IPv4: &cidr}}}}
	}
	block := func(name, node, cidr, reserved string) *v2.AddressBlock {
		return &v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{v2.LabelPool: "app", v2.LabelNode: node, v2.LabelReserved: reserved}}, IPv4: &cidr}
	}
	for name, c := range map[string]struct {
		coil []runtime.Object
		with func(*lab)
		says string // empty if it isn't refused
	}{
		"done before": {coil: []runtime.Object{pool("10.1.0.0/28"), block("app-1", "n1", "10.1.0.4/30", "true")}},
		// Pods have addresses of this Coil: whatever v1's data say is over. A namespace is named that a killed run left out.
		"in use": {coil: []runtime.Object{pool("10.1.0.0/28"), block("app-1", "n1", "10.1.0.4/30", "true"), block("app-2", "n1", "10.1.0.8/30", "")},
			says: "AddressBlock app-2 of node n1 isn't reserved: this Coil gives addresses already, and dump's work is done: go on with coil-migrator replace; annotate namespace app with coil.cybozu.com/pool=app"},
		"in use, v1's blocks have gone": {coil: []runtime.Object{pool("10.1.0.0/28"), block("app-2", "n1", "10.1.0.8/30", "")}, says: "AddressBlock app-2 of node n1 isn't reserved"},
		"no place for the YAML":         {with: func(l *lab) { l.Check = func() error { return errors.New("no such folder") } }, says: "nothing was changed: check the place of the YAML: no such folder"},
		"no data":                       {with: func(l *lab) { l.entries = nil }, says: "--etcd-prefix"},
		"damaged data":                  {with: func(l *lab) { l.entries[3].Value = nil }, says: `"ip/10.1.0.4/1"`},
		"no etcd": {with: func(l *lab) {
			l.Read = func(context.Context) ([]coilv1.Entry, int64, error) { return nil, 0, errors.New("no etcd") }
		}, says: "no etcd"},
		"v1 runs":             {with: func(l *lab) { l.SkipUninstall = true }, says: "DaemonSet coil-node, Deployment coil-controllers, Pod coil-controllers-5d9-y on n1, Pod coil-node-x on n1"},
		"another pool":        {coil: []runtime.Object{pool("10.1.0.0/27")}, says: "AddressPool app exists"},
		"block in use":        {coil: []runtime.Object{block("app-1", "n1", "10.1.0.4/30", "")}, says: "AddressBlock app-1 of node n1 isn't reserved"},
		"block of another":    {coil: []runtime.Object{block("app-1", "n2", "10.1.0.4/30", "true")}, says: "AddressBlock app-1 of node n2 exists"},
		"block of other pool": {coil: []runtime.Object{block("x-0", "n2", "10.1.0.0/29", "true")}, says: "AddressBlock x-0 of node n2 exists"},
		"namespace": {with: func(l *lab) {
			ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "app", Annotations: map[string]string{v2.AnnotationPool: "other"}}}
			if err := l.kube.Tracker().Update(corev1.SchemeGroupVersion.WithResource("namespaces"), ns, ""); err != nil {
				panic(err)
			}
		}, says: "namespace app has the annotation"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := newLab(v1(), c.coil)
				if c.with != nil {
					c.with(l)
				}
				err := l.Run(t.Context())
				if c.says == "" {
					if err != nil {
						t.Error(err)
					}
					return
				}
				if err == nil || !strings.Contains(err.Error(), c.says) {
					t.Errorf("error %v, want one that says %q", err, c.says)
				} else if !strings.Contains(err.Error(), "nothing was changed: ") {
					t.Errorf("error %v, want one that says that nothing was changed", err)
				}
				l.want(t, nil)
			})
		})
	}
}

// A pod that doesn't end is named, and nothing is written. The error says what was deleted, also when somebody ends the wait.
func TestDumpWaitsInVain(t *testing.T) {
	const waits = "wait for the end of Coil v1's pods coil-controllers-5d9-y on n1, coil-node-x on n1: "
	const did = "; 2 objects of Coil v1 were deleted, no YAML was written: run dump again"
	signal := errors.New("interrupt signal received")
	for name, c := range map[string]struct {
		end  time.Duration // of the context
		says string
	}{"timeout": {time.Hour, "not within 1m0s (--timeout)"}, "signal": {10 * time.Second, signal.Error()}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := newLab(v1(), nil)
				l.podsEnd = -1
				ctx, cancel := context.WithTimeoutCause(t.Context(), c.end, signal)
				defer cancel()
				err := l.Run(ctx)
				if err == nil || !strings.HasPrefix(err.Error(), waits+c.says+"; ") || !strings.HasSuffix(err.Error(), did) {
					t.Errorf("error %v, want one that begins with %q and %q, and ends with %q", err, waits, c.says, did)
				}
				l.want(t, allChanges[:2])
			})
		})
	}
}
