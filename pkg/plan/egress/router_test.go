package egress

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/uuid"
	"sigs.k8s.io/yaml"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
)

var testImage = RouterImage{Name: "example.org/coil:1", PullPolicy: corev1.PullNever, Port: 5555}

func testEgress(template string) *v2.Egress {
	e := &v2.Egress{
		ObjectMeta: metav1.ObjectMeta{Namespace: "internet", Name: "nat", UID: "egress-uid", Generation: 4},
		Spec:       v2.EgressSpec{Destinations: []string{"0.0.0.0/0"}, Replicas: 2},
	}
	if template != "" {
		raw, err := yaml.YAMLToJSON([]byte(template))
		if err != nil {
			panic(err)
		}
		e.Spec.Template = &v2.EgressPodTemplate{Spec: &runtime.RawExtension{Raw: raw}}
	}
	return e
}

func mustDeployment(t *testing.T, e *v2.Egress) *appsv1.Deployment {
	t.Helper()
	d, err := RouterDeployment(e, testImage)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func egressContainer(t *testing.T, d *appsv1.Deployment) corev1.Container {
	t.Helper()
	cs := d.Spec.Template.Spec.Containers
	i := slices.IndexFunc(cs, func(c corev1.Container) bool { return c.Name == "egress" })
	if i < 0 {
		t.Fatalf("no container egress in %v", cs)
	}
	return cs[i]
}

func TestRouterDeployment(t *testing.T) {
	d := mustDeployment(t, testEgress(""))
	labels := map[string]string{"app.kubernetes.io/name": "coil", "app.kubernetes.io/instance": "nat", "app.kubernetes.io/component": "egress"}
	for what, got := range map[string]map[string]string{"labels": d.Labels, "selector": d.Spec.Selector.MatchLabels, "labels of pods": d.Spec.Template.Labels} {
		if diff := cmp.Diff(labels, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
	}
	owner := []metav1.OwnerReference{{APIVersion: "coil.cybozu.com/v2", Kind: "Egress", Name: "nat", UID: "egress-uid", Controller: new(true), BlockOwnerDeletion: new(true)}}
	if diff := cmp.Diff(owner, d.OwnerReferences); diff != "" {
		t.Errorf("owner (-want +got):\n%s", diff)
	}
	if d.Namespace != "internet" || d.Name != "nat" || *d.Spec.Replicas != 2 {
		t.Errorf("%s/%s has %d replicas", d.Namespace, d.Name, *d.Spec.Replicas)
	}
	spec := d.Spec.Template.Spec
	if spec.ServiceAccountName != "coil-egress" || !*spec.AutomountServiceAccountToken || *spec.TerminationGracePeriodSeconds != 60 {
		t.Errorf("account %q, token %v, grace period %d", spec.ServiceAccountName, *spec.AutomountServiceAccountToken, *spec.TerminationGracePeriodSeconds)
	}
	var spread []string
	for _, c := range spec.TopologySpreadConstraints {
		spread = append(spread, c.TopologyKey)
		if diff := cmp.Diff(labels, c.LabelSelector.MatchLabels); diff != "" || c.WhenUnsatisfiable != corev1.ScheduleAnyway {
			t.Errorf("spread over %s: %s %s", c.TopologyKey, c.WhenUnsatisfiable, diff)
		}
	}
	if want := []string{"kubernetes.io/hostname", "topology.kubernetes.io/zone"}; !slices.Equal(spread, want) {
		t.Errorf("spread over %q, want %q", spread, want)
	}
	c := egressContainer(t, d)
	if c.Image != testImage.Name || c.ImagePullPolicy != corev1.PullNever || !slices.Equal(c.Command, []string{"/coil-egress"}) || !slices.Equal(c.Args, []string{"--fou-port=5555"}) {
		t.Errorf("image %s (%s), command %q %q", c.Image, c.ImagePullPolicy, c.Command, c.Args)
	}
	sc := c.SecurityContext
	if diff := cmp.Diff(&corev1.Capabilities{Add: []corev1.Capability{"NET_ADMIN"}, Drop: []corev1.Capability{"ALL"}}, sc.Capabilities); diff != "" {
		t.Errorf("capabilities (-want +got):\n%s", diff)
	}
	if *sc.Privileged || *sc.AllowPrivilegeEscalation || !*sc.ReadOnlyRootFilesystem || *sc.RunAsUser != 0 {
		t.Errorf("security context %+v", sc)
	}
	var env []string
	for _, e := range c.Env {
		value := e.Value
		if e.ValueFrom != nil {
			value = e.ValueFrom.FieldRef.FieldPath
		}
		env = append(env, e.Name+"="+value)
	}
	if want := []string{"COIL_POD_ADDRESSES=status.podIPs", "COIL_POD_NAMESPACE=metadata.namespace", "COIL_POD_NAME=metadata.name", "COIL_EGRESS_NAME=nat", "COIL_NODE_ADDRESSES=status.hostIPs"}; !slices.Equal(env, want) {
		t.Errorf("environment %q, want %q", env, want)
	}
	if c.LivenessProbe.HTTPGet.Path != "/healthz" || c.ReadinessProbe.HTTPGet.Path != "/readyz" || c.ReadinessProbe.HTTPGet.Port.IntVal != 8081 {
		t.Errorf("probes %v, %v", c.LivenessProbe, c.ReadinessProbe)
	}
	if c.Resources.Requests.Cpu().IsZero() || c.Resources.Requests.Memory().IsZero() {
		t.Errorf("requests %v", c.Resources.Requests)
	}
}

func TestRouterTemplate(t *testing.T) {
	const flags = "--fou-port=5555"
	for _, tt := range []struct {
		name, template string
		check          func(*testing.T, corev1.PodSpec, corev1.Container)
	}{
		{"an empty spec", "{}", func(t *testing.T, s corev1.PodSpec, c corev1.Container) {
			if len(s.Containers) != 1 {
				t.Errorf("%d containers", len(s.Containers))
			}
		}},
		{"another container only", "containers: [{name: sidecar, image: s}]", func(t *testing.T, s corev1.PodSpec, c corev1.Container) {
			if len(s.Containers) != 2 || s.Containers[1].Name != "sidecar" || s.Containers[1].SecurityContext != nil || len(s.Containers[1].Env) > 0 {
				t.Errorf("containers %v", s.Containers)
			}
		}},
		{"the user's image, resources and probe", `containers:
- {name: egress, image: mine, resources: {limits: {memory: 400Mi}}, readinessProbe: {periodSeconds: 7, tcpSocket: {port: 1}}}`, func(t *testing.T, s corev1.PodSpec, c corev1.Container) {
			if c.Image != "mine" || c.ImagePullPolicy != "" || c.ReadinessProbe.PeriodSeconds != 7 {
				t.Errorf("image %s (%q), probe %v", c.Image, c.ImagePullPolicy, c.ReadinessProbe)
			}
			if c.Resources.Limits.Memory().String() != "400Mi" || !c.Resources.Requests.Memory().IsZero() || c.Resources.Requests.Cpu().String() != "100m" {
				t.Errorf("resources %v: a limit is the request, too", c.Resources)
			}
		}},
		{"flags of the user", "containers: [{name: egress, args: [--enable-sport-auto]}]", func(t *testing.T, s corev1.PodSpec, c corev1.Container) {
			if !slices.Equal(c.Args, []string{flags, "--enable-sport-auto"}) {
				t.Errorf("args %q", c.Args)
			}
		}},
		{"a command of the user", "containers: [{name: egress, command: [/x], args: [z]}]", func(t *testing.T, s corev1.PodSpec, c corev1.Container) {
			if !slices.Equal(c.Command, []string{"/x"}) || !slices.Equal(c.Args, []string{"z"}) {
				t.Errorf("command %q %q", c.Command, c.Args)
			}
		}},
		{"environment", "containers: [{name: egress, env: [{name: COIL_EGRESS_NAME, value: other}, {name: GOGC, value: '50'}]}]", func(t *testing.T, s corev1.PodSpec, c corev1.Container) {
			if len(c.Env) != 6 || c.Env[3].Value != "nat" || c.Env[5].Name != "GOGC" {
				t.Errorf("environment %v", c.Env)
			}
		}},
		{"rights that a router must not have", "containers: [{name: egress, securityContext: {privileged: true, runAsUser: 1000, capabilities: {add: [SYS_ADMIN]}}}]", func(t *testing.T, s corev1.PodSpec, c corev1.Container) {
			if *c.SecurityContext.Privileged || *c.SecurityContext.RunAsUser != 0 || !slices.Equal(c.SecurityContext.Capabilities.Add, []corev1.Capability{"NET_ADMIN"}) {
				t.Errorf("security context %+v", c.SecurityContext)
			}
		}},
		{"another account", "{serviceAccountName: admin, serviceAccount: admin}", func(t *testing.T, s corev1.PodSpec, c corev1.Container) {
			if s.ServiceAccountName != "coil-egress" || s.DeprecatedServiceAccount != "" {
				t.Errorf("accounts %q, %q", s.ServiceAccountName, s.DeprecatedServiceAccount)
			}
		}},
		{"affinity, tolerations, volumes, times", `{affinity: {nodeAffinity: {}}, tolerations: [{operator: Exists}], volumes: [{name: v, emptyDir: {}}],
  terminationGracePeriodSeconds: 5, nodeSelector: {a: b}, priorityClassName: high, runtimeClassName: r}`, func(t *testing.T, s corev1.PodSpec, c corev1.Container) {
			if s.Affinity == nil || len(s.TopologySpreadConstraints) > 0 || len(s.Tolerations) != 1 || len(s.Volumes) != 1 || *s.TerminationGracePeriodSeconds != 5 ||
				s.NodeSelector["a"] != "b" || s.NodeSelector["kubernetes.io/os"] != "linux" || s.PriorityClassName != "high" || *s.RuntimeClassName != "r" {
				t.Errorf("spec %+v", s)
			}
		}},
		{"constraints of the user", "topologySpreadConstraints: [{maxSkew: 2, topologyKey: rack, whenUnsatisfiable: DoNotSchedule}]", func(t *testing.T, s corev1.PodSpec, c corev1.Container) {
			if len(s.TopologySpreadConstraints) != 1 || s.TopologySpreadConstraints[0].TopologyKey != "rack" {
				t.Errorf("spread %v", s.TopologySpreadConstraints)
			}
		}},
		{"ports of the user", "containers: [{name: egress, ports: [{name: metrics, containerPort: 9090}, {containerPort: 8081}]}]", func(t *testing.T, s corev1.PodSpec, c corev1.Container) {
			if len(c.Ports) != 2 {
				t.Errorf("ports %v", c.Ports)
			}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := mustDeployment(t, testEgress(tt.template))
			tt.check(t, d.Spec.Template.Spec, egressContainer(t, d))
		})
	}
}

func TestRouterTemplateMetadata(t *testing.T) {
	e := testEgress("{}")
	e.Spec.Template.Metadata = v2.Metadata{
		Annotations: map[string]string{"a": "1"},
		Labels:      map[string]string{"team": "net", "app.kubernetes.io/name": "mine", "app.kubernetes.io/instance": "mine"},
	}
	pods := mustDeployment(t, e).Spec.Template.ObjectMeta
	want := metav1.ObjectMeta{Annotations: map[string]string{"a": "1"}, Labels: plan.RouterLabels("nat")}
	want.Labels["team"] = "net"
	if diff := cmp.Diff(want, pods); diff != "" {
		t.Errorf("metadata of pods (-want +got):\n%s", diff)
	}
	if len(e.Spec.Template.Metadata.Labels) != 3 || e.Spec.Template.Metadata.Labels["app.kubernetes.io/name"] != "mine" {
		t.Error("the Egress itself was changed")
	}
}

func TestInvalidTemplate(t *testing.T) {
	for template, where := range map[string]string{
		"{containers: [{name: egress, imag: x}]}":                       `unknown field "template.spec.containers[0].imag"`,
		"{containers: [{name: egress}], toleration: []}":                `unknown field "template.spec.toleration"`,
		"{Tolerations: []}":                                             `unknown field "template.spec.Tolerations"`,
		"{containers: [{name: 1}]}":                                     "template.spec.containers.name of type string",
		"{containers: {}}":                                              "template.spec.containers of type",
		"{containers: [{name: egress, resources: {limits: {cpu: x}}}]}": "quantities must match",
		"{containers: [{name: egress}, {name: egress}]}":                `template.spec.containers: "egress" is there twice`,
		"{containers: [{name: x, env: [{name: A}, {name: A}]}]}":        `template.spec.containers[x].env: "A" is there twice`,
		"{containers: [{name: x, ports: [{containerPort: 1}, {containerPort: 1, protocol: TCP}]}]}": `template.spec.containers[x].ports: "1/TCP"`,
		"{volumes: [{name: v}, {name: v}]}": "template.spec.volumes",
		"{hostNetwork: true}":               "template.spec.hostNetwork",
	} {
		_, err := RouterDeployment(testEgress(template), testImage)
		var invalid *TemplateError
		if !errors.As(err, &invalid) || !strings.Contains(err.Error(), where) {
			t.Errorf("%s: error %v, want %s", template, err, where)
		}
	}
}

// Routers and clients follow it live.
func TestSourcePortsLeaveTheDeploymentAlone(t *testing.T) {
	fixed, auto := testEgress(""), testEgress("")
	auto.Spec.FouSourcePortAuto, auto.Spec.OriginatingOnly, auto.Spec.Destinations = true, true, []string{"10.0.0.0/8"}
	if diff := cmp.Diff(mustDeployment(t, fixed), mustDeployment(t, auto)); diff != "" {
		t.Errorf("(-fixed +auto):\n%s", diff)
	}
}

func TestRouterStrategy(t *testing.T) {
	rolling := func(unavailable, surge string) appsv1.DeploymentStrategy {
		return appsv1.DeploymentStrategy{Type: "RollingUpdate", RollingUpdate: &appsv1.RollingUpdateDeployment{
			MaxUnavailable: new(intstr.Parse(unavailable)), MaxSurge: new(intstr.Parse(surge))}}
	}
	for _, tt := range []struct {
		name string
		have *appsv1.DeploymentStrategy
		want appsv1.DeploymentStrategy
	}{
		{"none", nil, rolling("25%", "25%")},
		{"empty", &appsv1.DeploymentStrategy{}, rolling("25%", "25%")},
		{"half", &appsv1.DeploymentStrategy{RollingUpdate: &appsv1.RollingUpdateDeployment{MaxUnavailable: new(intstr.FromInt32(0))}}, rolling("0", "25%")},
		{"recreate", &appsv1.DeploymentStrategy{Type: "Recreate"}, appsv1.DeploymentStrategy{Type: "Recreate"}},
	} {
		e := testEgress("")
		e.Spec.Strategy = tt.have
		if diff := cmp.Diff(tt.want, mustDeployment(t, e).Spec.Strategy); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}

func TestRouterService(t *testing.T) {
	config := func(seconds int32) *corev1.SessionAffinityConfig {
		return &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: new(seconds)}}
	}
	for _, tt := range []struct {
		name     string
		affinity corev1.ServiceAffinity
		config   *corev1.SessionAffinityConfig
		want     corev1.ServiceAffinity
		wantConf *corev1.SessionAffinityConfig
	}{
		{"default", "", nil, "ClientIP", config(10800)},
		{"client", "ClientIP", nil, "ClientIP", config(10800)},
		{"an hour", "ClientIP", config(3600), "ClientIP", config(3600)},
		{"none", "None", nil, "None", nil},
		{"none, with the rest of an hour", "None", config(3600), "None", nil},
	} {
		e := testEgress("")
		e.Spec.SessionAffinity, e.Spec.SessionAffinityConfig = tt.affinity, tt.config
		s := RouterService(e, 5556)
		want := corev1.ServiceSpec{
			Type: "ClusterIP", Selector: plan.RouterLabels("nat"), SessionAffinity: tt.want, SessionAffinityConfig: tt.wantConf,
			IPFamilyPolicy: new(corev1.IPFamilyPolicyPreferDualStack), InternalTrafficPolicy: new(corev1.ServiceInternalTrafficPolicyCluster),
			Ports: []corev1.ServicePort{{Protocol: "UDP", Port: 5556, TargetPort: intstr.FromInt32(5556)}},
		}
		if diff := cmp.Diff(want, s.Spec); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}

func TestRouterBudget(t *testing.T) {
	e := testEgress("")
	if b := RouterBudget(e); b != nil {
		t.Errorf("budget %v without one in spec", b)
	}
	e.Spec.PodDisruptionBudget = &v2.EgressPDBSpec{MaxUnavailable: new(intstr.FromString("50%"))}
	want := policyv1.PodDisruptionBudgetSpec{
		MaxUnavailable: new(intstr.FromString("50%")), Selector: &metav1.LabelSelector{MatchLabels: plan.RouterLabels("nat")},
		UnhealthyPodEvictionPolicy: new(policyv1.AlwaysAllow),
	}
	if diff := cmp.Diff(want, RouterBudget(e).Spec); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestRouterServiceAccount(t *testing.T) {
	egress := func(name, uid string) *v2.Egress {
		return &v2.Egress{ObjectMeta: metav1.ObjectMeta{Namespace: "internet", Name: name, UID: types.UID(uid)}}
	}
	gone := egress("gone", "3")
	gone.DeletionTimestamp = new(metav1.Now())
	a := RouterServiceAccount("internet", []*v2.Egress{egress("b", "2"), gone, egress("a", "1")})
	var owners []string
	for _, o := range a.OwnerReferences {
		owners = append(owners, o.Name+" "+string(o.UID))
		if o.Controller != nil {
			t.Errorf("%s is the only controller", o.Name)
		}
	}
	if !slices.Equal(owners, []string{"a 1", "b 2"}) {
		t.Errorf("owners %q", owners)
	}
	if a := RouterServiceAccount("internet", []*v2.Egress{gone}); a != nil {
		t.Errorf("account %v of an Egress that goes", a)
	}
}

// Of thousands of Egresses a few own the account, old ones and new ones: were they deleted together, so would it be.
func TestOwnersAreBounded(t *testing.T) {
	var all []*v2.Egress
	for i := range 3000 {
		all = append(all, &v2.Egress{ObjectMeta: metav1.ObjectMeta{
			Namespace: "a", Name: fmt.Sprintf("%04d", 2999-i), UID: uuid.NewUUID(),
			CreationTimestamp: metav1.NewTime(time.Date(2026, 1, 1, 0, 0, i, 0, time.UTC)),
		}})
	}
	a := RouterServiceAccount("a", all)
	newest := slices.MinFunc(a.OwnerReferences, func(a, b metav1.OwnerReference) int { return strings.Compare(a.Name, b.Name) })
	if n := len(a.OwnerReferences); n != mostOwners || newest.Name > "1500" { // by chance once in 2^32 times
		t.Errorf("%d owners, the newest is %s", n, newest.Name)
	}
	if all[0].Name != "2999" {
		t.Error("the list was sorted, which is a cache's")
	}
	slices.Reverse(all)
	if d := cmp.Diff(a, RouterServiceAccount("a", all)); d != "" {
		t.Errorf("in another order there are others:\n%s", d)
	}
}

func TestMostRouters(t *testing.T) {
	for _, tt := range []struct {
		replicas int32
		surge    string
		want     int
	}{
		{4, "1", 5}, {4, "50%", 6}, {4, "-1", 4}, {4, "x", 4}, {math.MaxInt32, "3000000000", math.MaxInt32},
		{math.MaxInt32, "100%", 2 * math.MaxInt32}, {math.MaxInt32, "400000000000%", 2 * math.MaxInt32},
		{math.MaxInt32, "429496729701%", 2 * math.MaxInt32}, // int64 would overflow
	} {
		e := &v2.Egress{Spec: v2.EgressSpec{Replicas: tt.replicas, Strategy: &appsv1.DeploymentStrategy{
			RollingUpdate: &appsv1.RollingUpdateDeployment{MaxSurge: new(intstr.Parse(tt.surge))},
		}}}
		if got := MostRouters(e); got != tt.want {
			t.Errorf("%d replicas, surge %s: %d routers, want %d", tt.replicas, tt.surge, got, tt.want)
		}
	}
}

func TestRouterBinding(t *testing.T) {
	egresses := []*v2.Egress{
		{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "2", UID: "u2"}}, {ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "1", UID: "u1"}},
		{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "3", UID: "u3", DeletionTimestamp: new(metav1.Now())}},
	}
	b := RouterBinding("a", egresses)
	if len(b.OwnerReferences) != 2 || b.OwnerReferences[0].Name != "1" || b.Namespace != "a" || !BindsRouters(b) {
		t.Errorf("binding %+v", b)
	}
	if b := RouterBinding("a", egresses[2:]); b != nil {
		t.Errorf("binding %v of an Egress that goes", b)
	}
	for what, change := range map[string]func(*rbacv1.RoleBinding){
		"another role":      func(b *rbacv1.RoleBinding) { b.RoleRef.Name = "view" },
		"a Role":            func(b *rbacv1.RoleBinding) { b.RoleRef.Kind = "Role" },
		"another namespace": func(b *rbacv1.RoleBinding) { b.Subjects[0].Namespace = "b" },
		"nobody":            func(b *rbacv1.RoleBinding) { b.Subjects = nil },
	} {
		other := b.DeepCopy()
		if change(other); BindsRouters(other) {
			t.Errorf("%s: it binds routers", what)
		}
	}
}

func TestWithoutRouters(t *testing.T) {
	subject := func(kind, ns, name string) rbacv1.Subject {
		return rbacv1.Subject{Kind: kind, Namespace: ns, Name: name}
	}
	have := []rbacv1.Subject{
		subject("User", "", "auditor"), subject("ServiceAccount", "old", "coil-egress"), subject("ServiceAccount", "x", "other"),
		subject("ServiceAccount", "a", "coil-egress"),
	}
	got := WithoutRouters(have, func(namespace string) bool { return namespace == "a" })
	if diff := cmp.Diff([]rbacv1.Subject{have[0], have[2], have[3]}, got); diff != "" {
		t.Errorf("subjects (-want +got):\n%s", diff)
	}
	if len(have) != 4 || have[1].Namespace != "old" {
		t.Errorf("the given subjects were changed: %v", have)
	}
}
