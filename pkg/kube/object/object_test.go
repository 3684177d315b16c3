package object

import (
	"fmt"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/egress"
	"github.com/coil-net/coil/pkg/testkit"
)

func parse(t *testing.T, text string) any {
	t.Helper()
	var v any
	if err := yaml.Unmarshal([]byte(text), &v); err != nil {
		t.Fatal(err)
	}
	return v
}

func TestCovers(t *testing.T) {
	for _, tt := range []struct {
		name, have, want string
		covers           bool
	}{
		{"equal", "{a: 1, b: [x]}", "{a: 1, b: [x]}", true},
		{"more", "{a: 1, b: 2}", "{a: 1}", true},
		{"less", "{a: 1}", "{a: 1, b: 2}", false},
		{"another value", "{a: 1}", "{a: 2}", false},
		{"another type", "{a: '1'}", "{a: 1}", false},
		{"false isn't written", "{}", "{paused: false}", true},
		{"true is", "{}", "{paused: true}", false},
		{"true for false", "{paused: true}", "{paused: false}", false},
		{"zero is a value", "{}", "{replicas: 0}", false},
		{"an empty list", "{}", "{args: []}", true},
		{"more elements of one owner", "{args: [a, b]}", "{args: [a]}", false},
		{"another order of one owner", "{args: [a, b]}", "{args: [b, a]}", false},
		{"filled in elements of one owner", "{tolerations: [{key: a, operator: Equal}]}", "{tolerations: [{key: a}]}", true},
		{"more elements of several owners", "{containers: [{name: sidecar}, {name: egress, image: i}]}", "{containers: [{name: egress}]}", true},
		{"changed elements of several owners", "{containers: [{name: egress, image: j}]}", "{containers: [{name: egress, image: i}]}", false},
		{"a larger selector", "{selector: {a: b, c: d}}", "{selector: {a: b}}", false},
		{"larger labels", "{labels: {a: b, c: d}}", "{labels: {a: b}}", true},
		{"a larger selector of pods", "{selector: {matchLabels: {a: b, c: d}}}", "{selector: {matchLabels: {a: b}}}", false},
		{"an empty map", "{emptyDir: {}}", "{emptyDir: {}}", true},
		{"no map", "{}", "{emptyDir: {}}", false},
	} {
		if got := covers(parse(t, tt.have), parse(t, tt.want)); got != tt.covers {
			t.Errorf("%s: %s covers %s: %v", tt.name, tt.have, tt.want, got)
		}
	}
}

// TestConfiguration holds that applying owns what is wanted, and nothing that is empty.
func TestConfiguration(t *testing.T) {
	e := &v2.Egress{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "nat", UID: "u"}, Spec: v2.EgressSpec{Replicas: 1}}
	want, err := egress.RouterDeployment(e, egress.RouterImage{Name: "i", Port: 5555})
	if err != nil {
		t.Fatal(err)
	}
	want.Spec.Template.Spec.Containers = append(want.Spec.Template.Spec.Containers, corev1.Container{Name: "sidecar"})
	want.Spec.Template.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
	c, err := newConfiguration(want)
	if err != nil {
		t.Fatal(err)
	}
	content := c.content.Object
	spec := content["spec"].(map[string]any)
	pod := spec["template"].(map[string]any)["spec"].(map[string]any)
	if _, ok := content["status"]; ok || spec["paused"] != false {
		t.Errorf("status is there: %v, paused is %v", ok, spec["paused"])
	}
	if sidecar := pod["containers"].([]any)[1].(map[string]any); len(sidecar) != 1 {
		t.Errorf("sidecar %v", sidecar)
	}
	if v := pod["volumes"].([]any)[0].(map[string]any); v["emptyDir"] == nil {
		t.Errorf("volume %v", v)
	}

	applied := want.DeepCopy()
	applied.Annotations = map[string]string{v2.AnnotationApplied: c.hash, "deployment.kubernetes.io/revision": "1"}
	applied.Spec.RevisionHistoryLimit = new(int32(10))
	applied.TypeMeta = metav1.TypeMeta{} // as in a cache
	for name, tt := range map[string]struct {
		change func(*appsv1.Deployment)
		done   bool
	}{
		"as it was applied":       {func(*appsv1.Deployment) {}, true},
		"a status":                {func(d *appsv1.Deployment) { d.Status.Replicas = 3 }, true},
		"changed":                 {func(d *appsv1.Deployment) { d.Spec.Replicas = new(int32(7)) }, false},
		"from an earlier version": {func(d *appsv1.Deployment) { d.Annotations[v2.AnnotationApplied] = "x" }, false},
		"paused":                  {func(d *appsv1.Deployment) { d.Spec.Paused = true }, false},
		"another owner":           {func(d *appsv1.Deployment) { d.OwnerReferences[0].UID = "x" }, false},
	} {
		d := applied.DeepCopy()
		tt.change(d)
		if done, err := c.done(d); err != nil || done != tt.done {
			t.Errorf("%s: done %v, error %v", name, done, err)
		}
	}
}

// Users write lists of thousands. Comparing each element with each would take minutes.
func TestLongLists(t *testing.T) {
	const n = 30_000
	for field, key := range keyed {
		var have, want []any
		for i := range n {
			have = append(have, map[string]any{key: fmt.Sprint(n - i), "added": "by another"})
			want = append(want, map[string]any{key: fmt.Sprint(i + 1)})
		}
		start := time.Now()
		if !coversField(field, have, want) {
			t.Errorf("%s: not all of it found", field)
		}
		if took := time.Since(start); took > testkit.Timeout(2*time.Second) {
			t.Errorf("%s: %d elements took %s", field, n, took)
		}
		if coversField(field, have[1:], want) {
			t.Errorf("%s: one that isn't there was found", field)
		}
	}
	// Ports of a Service have another key than those of a container.
	have := []any{map[string]any{"port": int64(1)}, map[string]any{"port": int64(2), "protocol": "UDP"}}
	for port, want := range map[int64]bool{2: true, 3: false} {
		if got := coversField("ports", have, []any{map[string]any{"port": port}}); got != want {
			t.Errorf("port %d: %v", port, got)
		}
	}
}
