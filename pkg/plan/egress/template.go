package egress

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	kubejson "k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/apimachinery/pkg/util/intstr"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
)

// Ports of routers, as coil-egress has them by default.
const (
	routerMetricsPort = 8080
	routerHealthPort  = 8081
)

// routerMetricsName is the name of the container's port with metrics.
const routerMetricsName = "metrics"

// MetricsPortOf returns the port at which the container of a router serves its metrics: that of the
// name or, where the user has given it another one, of the number.
func MetricsPortOf(c corev1.Container) (uint16, bool) {
	i := slices.IndexFunc(c.Ports, func(p corev1.ContainerPort) bool { return p.Name == routerMetricsName })
	if i < 0 {
		i = slices.IndexFunc(c.Ports, func(p corev1.ContainerPort) bool {
			return p.ContainerPort == routerMetricsPort && cmp.Or(p.Protocol, corev1.ProtocolTCP) == corev1.ProtocolTCP
		})
	}
	if i < 0 {
		return 0, false
	}
	return uint16(c.Ports[i].ContainerPort), true
}

// routerGrace, in seconds, is time enough for a router to be taken out of its Service and to
// forward packets that are still on their way.
const routerGrace = 60

// routerPodSpec returns the spec of router pods: the user's, with the container egress
// completed, and with constraints that keep routers apart.
func routerPodSpec(e *v2.Egress, image RouterImage) (corev1.PodSpec, error) {
	spec, err := decodeTemplate(e.Spec.Template)
	if err != nil {
		return corev1.PodSpec{}, err
	}
	if spec.HostNetwork {
		return corev1.PodSpec{}, templateError("template.spec.hostNetwork: a router needs a network of its own, in which it may filter and translate")
	}
	if spec.HostUsers != nil && !*spec.HostUsers {
		return corev1.PodSpec{}, templateError("template.spec.hostUsers: a router needs the users of its node: the kernel lets no others receive FoU")
	}
	if err := twice(spec); err != nil {
		return corev1.PodSpec{}, err
	}
	i := slices.IndexFunc(spec.Containers, func(c corev1.Container) bool { return c.Name == v2.EgressContainerName })
	if i < 0 {
		spec.Containers = slices.Insert(spec.Containers, 0, corev1.Container{Name: v2.EgressContainerName})
		i = 0
	}
	completeContainer(&spec.Containers[i], e.Name, image)

	spec.ServiceAccountName, spec.DeprecatedServiceAccount = RouterAccount, ""
	spec.AutomountServiceAccountToken = cmp.Or(spec.AutomountServiceAccountToken, new(true))
	spec.TerminationGracePeriodSeconds = cmp.Or(spec.TerminationGracePeriodSeconds, new(int64(routerGrace)))
	if _, ok := spec.NodeSelector[corev1.LabelOSStable]; !ok {
		if spec.NodeSelector == nil {
			spec.NodeSelector = map[string]string{}
		}
		spec.NodeSelector[corev1.LabelOSStable] = "linux"
	}
	if spec.Affinity == nil && len(spec.TopologySpreadConstraints) == 0 {
		for _, key := range []string{corev1.LabelHostname, corev1.LabelTopologyZone} {
			spec.TopologySpreadConstraints = append(spec.TopologySpreadConstraints, corev1.TopologySpreadConstraint{
				MaxSkew: 1, TopologyKey: key, WhenUnsatisfiable: corev1.ScheduleAnyway,
				LabelSelector: &metav1.LabelSelector{MatchLabels: plan.RouterLabels(e.Name)},
			})
		}
	}
	return spec, nil
}

// strict refuses fields that it doesn't know, and says where they are.
var strict = func() runtime.Decoder {
	s := runtime.NewScheme()
	s.AddKnownTypes(corev1.SchemeGroupVersion, &corev1.PodTemplate{})
	return kubejson.NewSerializerWithOptions(kubejson.DefaultMetaFactory, s, s, kubejson.SerializerOptions{Strict: true})
}()

// decodeTemplate decodes the spec of a template as that of a PodTemplate, so that an
// error names the field as the user sees it: template.spec...
func decodeTemplate(t *v2.EgressPodTemplate) (corev1.PodSpec, error) {
	if t == nil || t.Spec == nil || len(t.Spec.Raw) == 0 {
		return corev1.PodSpec{}, nil
	}
	text, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "PodTemplate",
		"template": map[string]json.RawMessage{"spec": t.Spec.Raw},
	})
	if err != nil {
		return corev1.PodSpec{}, templateError("template.spec: %v", err)
	}
	into := &corev1.PodTemplate{}
	if _, _, err := strict.Decode(text, nil, into); err != nil {
		return corev1.PodSpec{}, templateError("%v", err)
	}
	return into.Template.Spec, nil
}

// twice refuses lists that have an element twice, which can't be applied.
func twice(spec corev1.PodSpec) error {
	lists := map[string][]string{}
	add := func(list, key string) { lists[list] = append(lists[list], key) }
	for _, v := range spec.Volumes {
		add("volumes", v.Name)
	}
	for _, s := range spec.ImagePullSecrets {
		add("imagePullSecrets", s.Name)
	}
	for _, a := range spec.HostAliases {
		add("hostAliases", a.IP)
	}
	for _, c := range spec.TopologySpreadConstraints {
		add("topologySpreadConstraints", c.TopologyKey+" "+string(c.WhenUnsatisfiable))
	}
	for field, containers := range map[string][]corev1.Container{"containers": spec.Containers, "initContainers": spec.InitContainers} {
		for _, c := range containers {
			add(field, c.Name)
			for _, e := range c.Env {
				add(field+"["+c.Name+"].env", e.Name)
			}
			for _, m := range c.VolumeMounts {
				add(field+"["+c.Name+"].volumeMounts", m.MountPath)
			}
			for _, p := range c.Ports {
				add(field+"["+c.Name+"].ports", fmt.Sprintf("%d/%s", p.ContainerPort, cmp.Or(p.Protocol, corev1.ProtocolTCP)))
			}
		}
	}
	for _, list := range slices.Sorted(maps.Keys(lists)) {
		keys := lists[list]
		slices.Sort(keys)
		for i := 1; i < len(keys); i++ {
			if keys[i] == keys[i-1] {
				return templateError("template.spec.%s: %q is there twice", list, keys[i])
			}
		}
	}
	return nil
}

// completeContainer fills in the fields that the user left open, and sets those that a router can't do without.
func completeContainer(c *corev1.Container, egress string, image RouterImage) {
	if c.Image == "" {
		c.Image = image.Name
		c.ImagePullPolicy = cmp.Or(c.ImagePullPolicy, image.PullPolicy)
	}
	if len(c.Command) == 0 {
		c.Command = []string{"/coil-egress"}
		c.Args = append([]string{fmt.Sprintf("--fou-port=%d", image.Port)}, c.Args...)
	}
	c.Env = append(routerEnv(egress), slices.DeleteFunc(c.Env, func(e corev1.EnvVar) bool {
		return slices.ContainsFunc(routerEnv(egress), func(own corev1.EnvVar) bool { return own.Name == e.Name })
	})...)
	// Root without any right but to change the pod's own network.
	c.SecurityContext = &corev1.SecurityContext{
		Capabilities:             &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}, Add: []corev1.Capability{"NET_ADMIN"}},
		Privileged:               new(false),
		AllowPrivilegeEscalation: new(false),
		ReadOnlyRootFilesystem:   new(true),
		RunAsUser:                new(int64(0)),
		RunAsNonRoot:             new(false),
		SeccompProfile:           &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
	}
	for _, p := range []corev1.ContainerPort{
		{Name: routerMetricsName, ContainerPort: routerMetricsPort, Protocol: corev1.ProtocolTCP},
		{Name: "health", ContainerPort: routerHealthPort, Protocol: corev1.ProtocolTCP},
	} {
		if !slices.ContainsFunc(c.Ports, func(have corev1.ContainerPort) bool {
			return have.Name == p.Name || have.ContainerPort == p.ContainerPort && have.Protocol != corev1.ProtocolUDP
		}) {
			c.Ports = append(c.Ports, p)
		}
	}
	c.LivenessProbe = cmp.Or(c.LivenessProbe, probe("/healthz", 10, 6))
	c.ReadinessProbe = cmp.Or(c.ReadinessProbe, probe("/readyz", 2, 1)) // clients notice soon that a router is gone
	for name, least := range map[corev1.ResourceName]string{corev1.ResourceCPU: "100m", corev1.ResourceMemory: "64Mi"} {
		_, requested := c.Resources.Requests[name]
		_, limited := c.Resources.Limits[name] // which is then the request, too
		if requested || limited {
			continue
		}
		if c.Resources.Requests == nil {
			c.Resources.Requests = corev1.ResourceList{}
		}
		c.Resources.Requests[name] = resource.MustParse(least)
	}
}

func probe(path string, period, failures int32) *corev1.Probe {
	return &corev1.Probe{
		ProbeHandler:  corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: path, Port: intstr.FromInt32(routerHealthPort)}},
		PeriodSeconds: period, TimeoutSeconds: 5, FailureThreshold: failures,
	}
}

// routerEnv is the environment that coil-egress reads.
func routerEnv(egress string) []corev1.EnvVar {
	field := func(name, path string) corev1.EnvVar {
		return corev1.EnvVar{Name: name, ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: path}}}
	}
	return []corev1.EnvVar{
		field("COIL_POD_ADDRESSES", "status.podIPs"),
		field("COIL_POD_NAMESPACE", "metadata.namespace"),
		field("COIL_POD_NAME", "metadata.name"),
		{Name: "COIL_EGRESS_NAME", Value: egress},
		// After the variables of routers of 2.x, which keep their places.
		field("COIL_NODE_ADDRESSES", "status.hostIPs"),
	}
}
