package egress

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
)

// FoU belongs to who has rights in the node's own user namespace.
func TestUserNamespacesOfRouters(t *testing.T) {
	for template, words := range map[string]string{
		"{hostUsers: false}": "template.spec.hostUsers",
		"{hostUsers: true}":  "",
		"{}":                 "",
	} {
		_, err := RouterDeployment(testEgress(template), testImage)
		var invalid *TemplateError
		if words == "" && err != nil || words != "" && (!errors.As(err, &invalid) || !strings.Contains(err.Error(), words)) {
			t.Errorf("%s: error %v, want %q", template, err, words)
		}
	}
}

// Whatever a template says, it is refused with a reason, or its routers have the rights of routers and no others, the labels
// by which their Deployment finds them, and what routers need of their environment.
func FuzzTemplate(f *testing.F) {
	for _, template := range []string{
		`{}`, `null`, `[]`, `{"hostNetwork":true}`, `{"hostUsers":false}`, `{"containers":[{"name":"egress","securityContext":{"privileged":true,"capabilities":{"add":["SYS_ADMIN"]}}}]}`,
		`{"containers":[{"name":"egress"},{"name":"egress"}]}`, `{"containers":[{"name":"x","image":"y","ports":[{"containerPort":8080}]}],"volumes":[{"name":"a"},{"name":"a"}]}`,
		`{"serviceAccountName":"admin","serviceAccount":"admin","nodeSelector":{"kubernetes.io/os":"plan9"},"affinity":{},"unknown":1}`,
		`{"containers":[{"name":"egress","env":[{"name":"COIL_POD_NAME","value":"other"}],"command":["/bin/sh"],"resources":{"limits":{"cpu":"1e3"}}}]}`,
	} {
		f.Add([]byte(template), "app.kubernetes.io/instance", "another")
	}
	f.Fuzz(func(t *testing.T, template []byte, key, value string) {
		e := testEgress("")
		e.Spec.Template = &v2.EgressPodTemplate{
			Metadata: v2.Metadata{Labels: map[string]string{key: value}, Annotations: map[string]string{key: value}},
			Spec:     &runtime.RawExtension{Raw: template},
		}
		d, err := RouterDeployment(e, testImage)
		var invalid *TemplateError
		if err != nil {
			if !errors.As(err, &invalid) || invalid.Reason == "" {
				t.Errorf("%s: the error is %v (%T), want a *TemplateError with a reason", template, err, err)
			}
			return
		}
		for k, v := range plan.RouterLabels(e.Name) {
			if d.Spec.Selector.MatchLabels[k] != v || d.Spec.Template.Labels[k] != v {
				t.Errorf("the selector is %v, the labels of pods %v", d.Spec.Selector.MatchLabels, d.Spec.Template.Labels)
			}
		}
		spec := d.Spec.Template.Spec
		if spec.HostNetwork || spec.HostUsers != nil && !*spec.HostUsers || spec.ServiceAccountName != RouterAccount || spec.DeprecatedServiceAccount != "" {
			t.Errorf("%s: the pod is %+v", template, spec)
		}
		var routers []corev1.Container
		for _, c := range spec.Containers {
			if c.Name == v2.EgressContainerName {
				routers = append(routers, c)
			}
		}
		if len(routers) != 1 {
			t.Fatalf("%s: %d containers of routers", template, len(routers))
		}
		c := routers[0]
		want := egressContainer(t, mustDeployment(t, testEgress("")))
		if diff := cmp.Diff(want.SecurityContext, c.SecurityContext); diff != "" {
			t.Errorf("%s: security context (-want +got):\n%s", template, diff)
		}
		if len(c.Env) < len(want.Env) || cmp.Diff(want.Env, c.Env[:len(want.Env)]) != "" || slices.ContainsFunc(c.Env[len(want.Env):], func(v corev1.EnvVar) bool {
			return slices.ContainsFunc(want.Env, func(own corev1.EnvVar) bool { return own.Name == v.Name })
		}) {
			t.Errorf("%s: environment %v", template, c.Env)
		}
		if c.Image == "" || len(c.Command) == 0 || c.LivenessProbe == nil || c.ReadinessProbe == nil {
			t.Errorf("%s: container %+v", template, c)
		}
	})
}
