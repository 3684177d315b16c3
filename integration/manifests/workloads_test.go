package manifests

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
)

// ports are what the contract says of each program: metrics and health.
var ports = map[string][2]int32{
	"coild":                  {9384, 9385},
	"coil-ipam-controller":   {9386, 9387},
	"coil-router":            {9388, 9389},
	"coil-egress-controller": {9396, 9397},
	"coil-lb-controller":     {9398, 9399},
	"coil-lb-agent":          {9400, 9401},
}

func checkWorkloads(t *testing.T, s set) {
	for _, w := range s.workloads() {
		t.Run(w.name, func(t *testing.T) {
			labels := map[string]string{"app.kubernetes.io/name": "coil", "app.kubernetes.io/component": w.name}
			if diff := cmp.Diff(labels, w.selector); diff != "" {
				t.Errorf("selector (-want +got):\n%s", diff)
			}
			for k, v := range labels {
				if w.template.Labels[k] != v {
					t.Errorf("pods lack the label %s=%s", k, v)
				}
			}
			spec := w.template.Spec
			if w.namespace != namespace || spec.ServiceAccountName != w.name || !spec.HostNetwork {
				t.Errorf("namespace %s, account %s, host network %v", w.namespace, spec.ServiceAccountName, spec.HostNetwork)
			}
			if !slices.ContainsFunc(s.accounts, func(a corev1.ServiceAccount) bool {
				return a.Name == spec.ServiceAccountName && a.Namespace == namespace
			}) {
				t.Errorf("there is no ServiceAccount %s", spec.ServiceAccountName)
			}
			if want := map[string]string{"DaemonSet": "system-node-critical", "Deployment": "system-cluster-critical"}[w.kind]; spec.PriorityClassName != want {
				t.Errorf("priority class %q, want %s", spec.PriorityClassName, want)
			}
			if !tolerates(spec.Tolerations, "node.kubernetes.io/not-ready", corev1.TaintEffectNoSchedule) ||
				!tolerates(spec.Tolerations, "node-role.kubernetes.io/control-plane", corev1.TaintEffectNoSchedule) {
				t.Errorf("tolerations %v keep it from nodes that wait for it", spec.Tolerations)
			}
			c := spec.Containers[0]
			if len(spec.Containers) != 1 || c.Name != w.name || !cmp.Equal(c.Command, []string{"/" + w.name}) {
				t.Errorf("%d containers, the first is %s with the command %q", len(spec.Containers), c.Name, c.Command)
			}
			want := ports[w.name]
			got := map[string]int32{}
			for _, p := range c.Ports {
				got[p.Name] = p.ContainerPort
			}
			if diff := cmp.Diff(map[string]int32{"metrics": want[0], "health": want[1]}, got); diff != "" {
				t.Errorf("ports (-want +got):\n%s", diff)
			}
			checkContainer(t, c)
			checkConfined(t, spec)
		})
	}
	for _, d := range s.deployments {
		if *d.Spec.Replicas != 2 {
			t.Errorf("%s has %d replicas, want 2", d.Name, *d.Spec.Replicas)
		}
		if !slices.ContainsFunc(s.budgets, func(b policyv1.PodDisruptionBudget) bool {
			return b.Name == d.Name && cmp.Equal(b.Spec.Selector.MatchLabels, d.Spec.Selector.MatchLabels)
		}) {
			t.Errorf("%s has no PodDisruptionBudget", d.Name)
		}
	}
}

func checkContainer(t *testing.T, c corev1.Container) {
	if c.LivenessProbe == nil || c.LivenessProbe.HTTPGet.Path != "/healthz" || c.ReadinessProbe == nil || c.ReadinessProbe.HTTPGet.Path != "/readyz" {
		t.Errorf("probes %v, %v", c.LivenessProbe, c.ReadinessProbe)
	}
	if c.Resources.Requests.Cpu().IsZero() || c.Resources.Requests.Memory().IsZero() {
		t.Errorf("requests %v", c.Resources.Requests)
	}
	sc := c.SecurityContext
	if sc == nil || sc.ReadOnlyRootFilesystem == nil || !*sc.ReadOnlyRootFilesystem {
		t.Error("the root file system is writable")
	}
	if privileged := sc != nil && sc.Privileged != nil && *sc.Privileged; privileged != (c.Name == "coild") {
		t.Errorf("privileged: %v", privileged)
	}
}

// capabilities are those that a container has which isn't privileged.
var capabilities = map[string][]corev1.Capability{"coil-installer": {"DAC_OVERRIDE"}, "coil-lb-agent": {"NET_ADMIN"}, "coil-router": {"NET_ADMIN"}}

// checkConfined holds that each container which isn't privileged has the least rights.
func checkConfined(t *testing.T, spec corev1.PodSpec) {
	for _, c := range slices.Concat(spec.InitContainers, spec.Containers) {
		sc := c.SecurityContext
		if sc == nil || sc.Privileged != nil && *sc.Privileged {
			continue // checkContainer says which may be
		}
		want := &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}, Add: capabilities[c.Name]}
		if diff := cmp.Diff(want, sc.Capabilities); diff != "" {
			t.Errorf("capabilities of %s (-want +got):\n%s", c.Name, diff)
		}
		if sc.AllowPrivilegeEscalation == nil || *sc.AllowPrivilegeEscalation || sc.ReadOnlyRootFilesystem == nil || !*sc.ReadOnlyRootFilesystem {
			t.Errorf("%s may get more rights, or write its root file system", c.Name)
		}
		profile := sc.SeccompProfile
		if profile == nil && spec.SecurityContext != nil {
			profile = spec.SecurityContext.SeccompProfile
		}
		if profile == nil || profile.Type != corev1.SeccompProfileTypeRuntimeDefault {
			t.Errorf("the seccomp profile of %s is %v", c.Name, profile)
		}
	}
}

func tolerates(all []corev1.Toleration, key string, effect corev1.TaintEffect) bool {
	return slices.ContainsFunc(all, func(t corev1.Toleration) bool {
		return t.Operator == corev1.TolerationOpExists && (t.Key == "" || t.Key == key) && (t.Effect == "" || t.Effect == effect)
	})
}
