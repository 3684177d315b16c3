package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/coil-net/coil/integration/bench/figures"
	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/testkit"
)

const (
	// statusRuns is how often coilctl looks.
	statusRuns = 5
	// What it may take.
	statusLimit = 3 * time.Second
	statusMiB   = 200
	statusLists = 10
)

// measureStatus measures what coilctl takes to look at a large cluster.
func measureStatus(ctx context.Context, o options, rep *report) (err error) {
	r, err := rig.New(ctx, rig.Options{NoController: true, Log: o.log})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	f, err := newFleet(ctx, r, o.nodes, o.log)
	if err == nil {
		err = f.addBlocks(ctx, o.blocks)
	}
	if err == nil {
		err = f.addCoilds(ctx)
	}
	if err != nil {
		return err
	}
	path, err := (&build.Builder{Log: o.log}).Own(ctx, "cmd/coilctl")
	if err != nil {
		return err
	}
	look := func(kubeconfig string) (usageOf, error) {
		if err := f.lead(ctx); err != nil {
			return usageOf{}, err
		}
		out, used, err := runMeasured(ctx, path, "status", "--kubeconfig="+kubeconfig)
		// Nothing is wrong: else what is would be a part of the measurement.
		if want := fmt.Sprintf("AddressBlock %d fine", o.blocks); err != nil || !strings.Contains(strings.Join(strings.Fields(string(out)), " "), want) {
			return used, fmt.Errorf("coilctl status: %w, without %q: %.4000s", err, want, out)
		}
		return used, nil
	}
	var took, busy []time.Duration
	var most int64
	for range statusRuns {
		used, err := look(r.API.Kubeconfig())
		if err != nil {
			return err
		}
		took, busy, most = append(took, used.Took), append(busy, used.Busy), max(most, used.MaxRSS)
	}
	lists, err := f.countLists(func(kubeconfig string) error { _, err := look(kubeconfig); return err })
	if err != nil {
		return err
	}
	what := fmt.Sprintf("coilctl status: %d Nodes, %d AddressBlocks, ", o.nodes, o.blocks)
	// The first run of a new API server may be told to come again a second later.
	rep.Figures.Note(what+"slowest", "s", figures.Quantile(took, 1)/1000)
	rep.Figures.Note(what+"time of processors, median", "s", figures.Quantile(busy, 0.5)/1000)
	// An operator waits for the API server as well, and tests share the machine.
	rep.Figures.AtMost(what+"median", "s", figures.Quantile(took, 0.5)/1000, testkit.Timeout(statusLimit).Seconds())
	rep.Figures.AtMost(what+"resident memory, most", "MiB", float64(most)/1024, statusMiB)
	rep.Figures.AtMost(what+"LISTs", "", float64(lists), statusLists)
	return nil
}

// addCoilds makes a pod of coild on each node, with about the size that it has in a cluster.
func (f *fleet) addCoilds(ctx context.Context) error {
	began := time.Now()
	pods := f.rig.Core.CoreV1().Pods(metav1.NamespaceSystem)
	err := each(ctx, len(f.nodes), func(ctx context.Context, i int) error {
		p := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{
				Name:        fmt.Sprintf("coild-%05d", i),
				Labels:      map[string]string{"app.kubernetes.io/name": "coil", "app.kubernetes.io/component": "coild", "controller-revision-hash": "5f7c9b8d4", "pod-template-generation": "3"},
				Annotations: map[string]string{"prometheus.io/scrape": "true", "prometheus.io/port": "9384"},
			},
			Spec: corev1.PodSpec{NodeName: f.nodes[i].name, HostNetwork: true, Containers: []corev1.Container{{Name: "coild", Image: "registry.example.com/coil:3.0.0"}}},
		}
		c := &p.Spec.Containers[0]
		for j := range 12 {
			name := fmt.Sprintf("folder-%d", j)
			p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/var/lib/" + name}}})
			c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: name, MountPath: "/var/lib/" + name})
			c.Env = append(c.Env, corev1.EnvVar{Name: fmt.Sprintf("COIL_SETTING_%d", j), Value: name})
		}
		p, err := pods.Create(ctx, p, metav1.CreateOptions{})
		if err != nil {
			return fmt.Errorf("create a pod of coild: %w", err)
		}
		now := metav1.Now()
		p.Status = corev1.PodStatus{
			Phase: corev1.PodRunning, HostIP: "172.16.0.1", PodIP: "172.16.0.1", StartTime: &now,
			ContainerStatuses: []corev1.ContainerStatus{{Name: "coild", Ready: true, State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: now}}}},
		}
		for _, t := range []corev1.PodConditionType{corev1.PodReadyToStartContainers, corev1.PodInitialized, corev1.PodReady, corev1.ContainersReady, corev1.PodScheduled} {
			p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: t, Status: corev1.ConditionTrue, LastTransitionTime: now})
		}
		_, err = pods.UpdateStatus(ctx, p, metav1.UpdateOptions{})
		return err
	})
	fmt.Fprintf(f.log, "%d pods of coild in %s\n", len(f.nodes), time.Since(began).Round(time.Second))
	return err
}

// lead renews the Lease of coil-ipam-controller, which doesn't run.
func (f *fleet) lead(ctx context.Context) error {
	leases := f.rig.Core.CoordinationV1().Leases(metav1.NamespaceSystem)
	if err := f.rig.TakeLease(ctx, plan.IPAMLease); err != nil {
		return err
	}
	now := metav1.NowMicro()
	l := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: plan.IPAMLease}, Spec: coordinationv1.LeaseSpec{RenewTime: &now}}
	_, err := leases.Create(ctx, l, metav1.CreateOptions{})
	return err
}

// countLists returns how many lists a program asks for, which gets a kubeconfig of a proxy.
func (f *fleet) countLists(run func(kubeconfig string) error) (lists int, err error) {
	cfg := f.rig.API.RESTConfig()
	target, err := url.Parse(cfg.Host)
	if err != nil {
		return 0, err
	}
	transport, err := rest.TransportFor(cfg)
	if err != nil {
		return 0, err
	}
	counted := newTraffic()
	proxy := httptest.NewServer(&httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) }, Transport: counted.to(transport)})
	defer proxy.Close()
	dir, err := os.MkdirTemp("", "coil-scale-")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	path := filepath.Join(dir, "kubeconfig")
	k := clientcmdapi.NewConfig()
	k.Clusters["proxy"], k.Contexts["proxy"], k.CurrentContext = &clientcmdapi.Cluster{Server: proxy.URL}, &clientcmdapi.Context{Cluster: "proxy"}, "proxy"
	if err := clientcmd.WriteToFile(*k, path); err != nil {
		return 0, err
	}
	if err := run(path); err != nil {
		return 0, err
	}
	kinds, counts := counted.byKind()
	for _, k := range kinds {
		if strings.HasPrefix(k, "list ") {
			lists += counts[k]
		}
	}
	if lists == 0 {
		return 0, fmt.Errorf("no list was counted, but %d %s", len(kinds), http.MethodGet)
	}
	return lists, nil
}
