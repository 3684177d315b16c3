package manifests

import (
	"fmt"
	"slices"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"

	"github.com/coil-net/coil/pkg/app/installer"
)

func checkCoild(t *testing.T, s set, v variant) {
	i := slices.IndexFunc(s.daemonSets, func(d appsv1.DaemonSet) bool { return d.Name == "coild" })
	pod := s.daemonSets[i].Spec.Template.Spec
	var flags []string
	for _, a := range pod.Containers[0].Args {
		if !slices.Contains([]string{"--state-dir=/var/lib/coil", "--cni-conf-dir=/host/etc/cni/net.d", "--machine-id-file=/host/node/etc/machine-id"}, a) {
			flags = append(flags, a)
		}
	}
	if diff := cmp.Diff(v.coildFlags, flags); diff != "" {
		t.Errorf("flags (-want +got):\n%s", diff)
	}
	if len(pod.InitContainers) != 1 || pod.InitContainers[0].Name != "coil-installer" {
		t.Fatalf("init containers %v, want coil-installer", pod.InitContainers)
	}
	env := pod.InitContainers[0].Env
	e := slices.IndexFunc(env, func(e corev1.EnvVar) bool { return e.Name == "CNI_NETCONF" })
	if e < 0 || env[e].ValueFrom.ConfigMapKeyRef.Name != "coil-config" || env[e].ValueFrom.ConfigMapKeyRef.Key != "cni_netconf" {
		t.Fatalf("environment of coil-installer: %v", env)
	}
	c := slices.IndexFunc(s.configMaps, func(c corev1.ConfigMap) bool { return c.Name == "coil-config" && c.Namespace == namespace })
	if c < 0 {
		t.Fatal("there is no ConfigMap coil-config")
	}
	checkConflist(t, s.configMaps[c].Data["cni_netconf"], v)
}

func checkEgressController(t *testing.T, s set, v variant) {
	i := slices.IndexFunc(s.deployments, func(d appsv1.Deployment) bool { return d.Name == "coil-egress-controller" })
	if i < 0 {
		if v.egress {
			t.Error("there is no coil-egress-controller")
		}
		return
	}
	c := s.deployments[i].Spec.Template.Spec.Containers[0]
	var flags []string
	if !v.ipam {
		flags = append(flags, "--enable-ipam=false")
	}
	if v.floating {
		flags = append(flags, "--enable-floating")
	}
	if diff := cmp.Diff(flags, c.Args); diff != "" {
		t.Errorf("flags of coil-egress-controller (-want +got):\n%s", diff)
	}
	env := map[string]string{}
	for _, e := range c.Env {
		env[e.Name] = e.ValueFrom.FieldRef.FieldPath
	}
	if diff := cmp.Diff(map[string]string{"COIL_POD_NAMESPACE": "metadata.namespace", "COIL_POD_NAME": "metadata.name"}, env); diff != "" {
		t.Errorf("environment of coil-egress-controller (-want +got):\n%s", diff)
	}
	// A subject that may bind rights must have them: the API server compares them.
	rules := map[string][]rbacv1.PolicyRule{}
	for _, r := range s.clusterRole {
		rules[r.Name] = r.Rules
	}
	for _, r := range rules["coil-egress"] {
		if !slices.ContainsFunc(rules["coil-egress-controller"], func(own rbacv1.PolicyRule) bool {
			return cmp.Equal(r.APIGroups, own.APIGroups) && cmp.Equal(r.Resources, own.Resources) && len(own.ResourceNames) == 0 &&
				!slices.ContainsFunc(r.Verbs, func(verb string) bool { return !slices.Contains(own.Verbs, verb) })
		}) {
			t.Errorf("coil-egress-controller lacks %v, so that it can't bind coil-egress", r)
		}
	}
}

func checkConflist(t *testing.T, text string, v variant) {
	if !v.ipam {
		// Which plugin gives the addresses is the admin's to say.
		if text != installer.NoNetConf {
			t.Errorf("cni_netconf is %q, want %s", text, installer.NoNetConf)
		}
		return
	}
	list, err := libcni.NetworkConfFromBytes([]byte(text))
	if err != nil {
		t.Fatalf("cni_netconf: %v", err)
	}
	var types []string
	for _, p := range list.Plugins {
		types = append(types, p.Network.Type)
	}
	got := fmt.Sprintf("%s %s %q", list.Name, list.CNIVersion, types)
	if want := `k8s-pod-network 1.1.0 ["coil"]`; got != want {
		t.Errorf("cni_netconf is %s, want %s", got, want)
	}
}
