package coilctl

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/yaml"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube/listing"
	"github.com/coil-net/coil/pkg/plan/health"
	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/plan/sysdump"
)

const (
	// coilsPods selects all pods of Coil.
	coilsPods = "app.kubernetes.io/name=coil"
	// pageSize is how many objects are in memory at once.
	pageSize = 250
	// Limits of files, in bytes.
	objectsLimit = 256 << 20
	logLimit     = 64 << 20
	logLines     = 50_000
	metricsLimit = 8 << 20
)

// surveyed is what a cluster has, which decides what is read of it.
type surveyed struct {
	at    time.Time
	nodes []string
	// pods are those of Coil, in order, and chosen those whose logs are read.
	pods, chosen []*corev1.Pod
	// images are those of Coil's containers, and systems what nodes run, each with how many there are.
	images, systems map[string]int
	// status is what coilctl status says, of what could be read.
	status    string
	statusErr error
}

// survey reads what there is, and tells the archive what it couldn't.
func (o *sysdumpOptions) survey(ctx context.Context, a *archive) *surveyed {
	found := &surveyed{at: a.at, images: map[string]int{}, systems: map[string]int{}}
	objects, err := o.read(ctx, everything)
	found.statusErr = errors.Join(err, o.leases(ctx, &objects))
	seen := health.Look(objects)
	var b bytes.Buffer
	shown := *o.tool
	shown.Out, shown.format, shown.colour = &b, formatTable, colourNever
	found.statusErr = errors.Join(found.statusErr, (&statusOptions{tool: &shown}).show(seen, objects.Now))
	found.status = b.String()

	var names []string
	a.problem("versions.yaml", listing.Each(ctx, listing.Source[corev1.Node]{Client: o.on.of(false), Resource: "nodes", Trim: trimToSystem}, func(n *corev1.Node) {
		i := n.Status.NodeInfo
		names = append(names, n.Name)
		found.systems[fmt.Sprintf("kernel %s, %s, %s, kubelet %s, %s", i.KernelVersion, i.OSImage, i.ContainerRuntimeVersion, i.KubeletVersion, i.Architecture)]++
	}))
	slices.Sort(names)
	var missing []string
	found.nodes, missing = sysdump.Nodes(names, seen.Findings, o.nodes, o.maxNodes)
	for _, name := range missing {
		a.problem("nodes/"+name, errors.New("there is no such Node"))
	}
	if left := len(names) - len(found.nodes); len(o.nodes) == 0 && left > 0 {
		a.problem("nodes", fmt.Errorf("%d of %d nodes are left out: --node chooses others, and --max-nodes more", left, len(names)))
	}
	pods := listing.Source[corev1.Pod]{Client: o.on.of(false), Resource: "pods", Selector: coilsPods, Trim: trimToContainers}
	a.problem("logs", listing.Each(ctx, pods, func(p *corev1.Pod) { found.pods = append(found.pods, p) }))
	slices.SortFunc(found.pods, func(a, b *corev1.Pod) int { return strings.Compare(a.Namespace+"/"+a.Name, b.Namespace+"/"+b.Name) })
	for _, p := range found.pods {
		for _, c := range containersOf(p) {
			found.images[c.Image]++
		}
		ofAll := slices.ContainsFunc(p.OwnerReferences, func(r metav1.OwnerReference) bool { return r.Kind == "DaemonSet" })
		if !ofAll || slices.Contains(found.nodes, p.Spec.NodeName) {
			found.chosen = append(found.chosen, p)
		}
	}
	return found
}

func containersOf(p *corev1.Pod) []corev1.Container {
	return slices.Concat(p.Spec.InitContainers, p.Spec.Containers)
}

func trimToSystem(n *corev1.Node) {
	n.Annotations, n.Labels, n.Spec, n.ManagedFields = nil, nil, corev1.NodeSpec{}, nil
	n.Status = corev1.NodeStatus{NodeInfo: n.Status.NodeInfo}
}

func trimToContainers(p *corev1.Pod) {
	trimmed := func(all []corev1.Container) (kept []corev1.Container) {
		for _, c := range all {
			kept = append(kept, corev1.Container{Name: c.Name, Image: c.Image, Ports: c.Ports})
		}
		return kept
	}
	p.Annotations, p.ManagedFields = nil, nil
	p.Spec = corev1.PodSpec{NodeName: p.Spec.NodeName, InitContainers: trimmed(p.Spec.InitContainers), Containers: trimmed(p.Spec.Containers)}
	p.Status = corev1.PodStatus{Phase: p.Status.Phase, InitContainerStatuses: p.Status.InitContainerStatuses, ContainerStatuses: p.Status.ContainerStatuses}
}

// entries are all files to read, in order.
func (o *sysdumpOptions) entries(found *surveyed) []entry {
	all := []entry{
		{"versions.yaml", 1 << 20, o.versions(found)},
		{"status.txt", 16 << 20, func(_ context.Context, w io.Writer) error {
			return errors.Join(copyScrubbed(w, strings.NewReader(found.status)), found.statusErr)
		}},
	}
	all = append(all, o.objects()...)
	for _, node := range found.nodes {
		all = append(all, o.ofNode(node, found.pods)...)
	}
	for _, p := range found.chosen {
		all = append(all, o.logs(p)...)
	}
	for _, p := range found.chosen {
		all = append(all, o.metrics(p)...)
	}
	return all
}

// objects are files with the objects of a kind each.
func (o *sysdumpOptions) objects() (all []entry) {
	add := func(group, version, resource, selector string, change func(object map[string]any) map[string]any) {
		all = append(all, entry{"objects/" + resource + ".yaml", objectsLimit, func(ctx context.Context, w io.Writer) error {
			return o.list(ctx, w, schema.GroupVersionResource{Group: group, Version: version, Resource: resource}, metav1.ListOptions{LabelSelector: selector}, change)
		}})
	}
	for _, resource := range []string{
		"addresspools", "addressblocks", "blockrequests", "addressclaims", "egresses", "egresspolicies", "egressclusterpolicies", "loadbalancergateways",
	} {
		add(v2.GroupVersion.Group, v2.GroupVersion.Version, resource, "", nil)
	}
	add("", "v1", "nodes", "", withoutImages)
	add("", "v1", "namespaces", "", nil)
	add("", "v1", "pods", coilsPods, nil)
	add("apps", "v1", "daemonsets", coilsPods, nil)
	add("apps", "v1", "deployments", coilsPods, nil)
	add("", "v1", "services", "", ifCoils)
	add("discovery.k8s.io", "v1", "endpointslices", "", ifCoils)
	add("coordination.k8s.io", "v1", "leases", "", func(lease map[string]any) map[string]any {
		if strings.HasPrefix(nameOf(lease), "coil") {
			return lease
		}
		return nil
	})
	add("", "v1", "events", "", ifAboutCoil)
	return all
}

// withoutImages leaves out most of a Node.
func withoutImages(node map[string]any) map[string]any {
	unstructured.RemoveNestedField(node, "status", "images")
	return node
}

func nameOf(o map[string]any) string { return (&unstructured.Unstructured{Object: o}).GetName() }

// ifCoils leaves out objects that Coil has nothing to do with.
func ifCoils(o map[string]any) map[string]any {
	u := &unstructured.Unstructured{Object: o}
	ours := func(key string) bool {
		domain, _, _ := strings.Cut(key, "/")
		return domain == v2.GroupVersion.Group || strings.HasSuffix(domain, "."+v2.GroupVersion.Group)
	}
	for _, all := range []map[string]string{u.GetLabels(), u.GetAnnotations()} {
		for key := range all {
			if ours(key) {
				return o
			}
		}
	}
	owned := slices.ContainsFunc(u.GetOwnerReferences(), func(r metav1.OwnerReference) bool { return ours(r.APIVersion) })
	class, _, _ := unstructured.NestedString(o, "spec", "loadBalancerClass")
	if owned || class == loadbalancer.Class || sysdump.Whole(u.GetLabels()) {
		return o
	}
	return nil
}

// ifAboutCoil leaves out Events of others.
func ifAboutCoil(event map[string]any) map[string]any {
	text := func(path ...string) string {
		s, _, _ := unstructured.NestedString(event, path...)
		return s
	}
	for _, source := range []string{text("source", "component"), text("reportingComponent"), text("involvedObject", "name")} {
		if strings.HasPrefix(source, "coil") {
			return event
		}
	}
	ours := strings.HasPrefix(text("involvedObject", "apiVersion"), v2.GroupVersion.Group+"/")
	if kind := text("involvedObject", "kind"); ours || kind == "Node" || text("reason") == "FailedCreatePodSandBox" || text("reason") == "FailedKillPod" {
		return event
	}
	return nil
}

// list writes objects as YAML documents. change may leave some out; nil changes none.
func (o *sysdumpOptions) list(ctx context.Context, w io.Writer, what schema.GroupVersionResource, opts metav1.ListOptions, change func(map[string]any) map[string]any) error {
	for opts.Limit = pageSize; ; {
		page, err := o.any.Resource(what).List(ctx, opts)
		if apierrors.IsNotFound(err) {
			return writeAll(w, "# this kind isn't installed\n")
		}
		if err != nil {
			return err
		}
		for _, item := range page.Items {
			object := item.Object
			if change != nil {
				object = change(object)
			}
			if object == nil {
				continue
			}
			sysdump.Clean(object)
			if err := writeYAML(w, object); err != nil {
				return notFull(err)
			}
		}
		if opts.Continue = page.GetContinue(); opts.Continue == "" {
			if err := writeAll(w, "# end\n"); err != nil {
				return notFull(err)
			}
			return nil
		}
	}
}

func writeAll(w io.Writer, text string) error {
	_, err := io.WriteString(w, text)
	return err
}

// writeYAML writes a document.
func writeYAML(w io.Writer, v any) error {
	text, err := yaml.Marshal(v)
	if err != nil {
		return err
	}
	return writeAll(w, "---\n"+string(text))
}

// serverVersion is that of the API server.
func serverVersion(ctx context.Context, core kubernetes.Interface) (v map[string]any, err error) {
	text, err := core.CoreV1().RESTClient().Get().AbsPath("/version").SetHeader("Accept", "application/json").Do(ctx).Raw()
	if err == nil {
		err = json.Unmarshal(text, &v)
	}
	return v, err
}

// ofNode are files about a node.
func (o *sysdumpOptions) ofNode(node string, all []*corev1.Pod) []entry {
	folder := path.Join("nodes", node)
	coild := running(slices.DeleteFunc(slices.Clone(all), func(p *corev1.Pod) bool {
		selector := labels.SelectorFromSet(labels.Set{"app.kubernetes.io/component": "coild"})
		return p.Spec.NodeName != node || !selector.Matches(labels.Set(p.Labels))
	}))
	asked := func(word string) func(context.Context, io.Writer) error {
		return func(ctx context.Context, w io.Writer) error {
			if coild == nil {
				return errors.New("no pod of coild runs on the node")
			}
			return o.execCoild(ctx, coild, w, &bounded{left: complaintsLimit}, word)
		}
	}
	return []entry{
		{path.Join(folder, "pods.yaml"), objectsLimit, func(ctx context.Context, w io.Writer) error {
			opts := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("spec.nodeName", node).String()}
			return o.list(ctx, w, schema.GroupVersionResource{Version: "v1", Resource: "pods"}, opts, func(pod map[string]any) map[string]any {
				if sysdump.Whole((&unstructured.Unstructured{Object: pod}).GetLabels()) {
					return pod
				}
				return sysdump.Trim(pod)
			})
		}},
		{path.Join(folder, "coild.json"), inspection.Limit, asked("node")},
		{path.Join(folder, "record.json"), inspection.DatabaseLimit, asked("record")},
	}
}

// logs are files with the logs of a pod's containers.
func (o *sysdumpOptions) logs(p *corev1.Pod) (all []entry) {
	folder := path.Join("logs", p.Namespace, p.Name)
	for _, c := range containersOf(p) {
		before := func(s corev1.ContainerStatus) bool { return s.Name == c.Name && s.RestartCount > 0 }
		restarted := slices.ContainsFunc(p.Status.InitContainerStatuses, before) || slices.ContainsFunc(p.Status.ContainerStatuses, before)
		all = append(all, entry{path.Join(folder, c.Name+".log"), logLimit, o.log(p, c.Name, false)})
		if restarted {
			all = append(all, entry{path.Join(folder, c.Name+".previous.log"), logLimit, o.log(p, c.Name, true)})
		}
	}
	return all
}

// log reads the log of a container, or of the one that ran before it. Of a long one the end is read.
func (o *sysdumpOptions) log(p *corev1.Pod, container string, previous bool) func(context.Context, io.Writer) error {
	return func(ctx context.Context, w io.Writer) error {
		opts := &corev1.PodLogOptions{Container: container, Previous: previous, Timestamps: true, TailLines: new(int64(logLines))}
		if !previous { // why it ended may be long ago
			opts.SinceSeconds = new(max(1, int64(o.since.Seconds())))
		}
		body, err := o.on.core.CoreV1().Pods(p.Namespace).GetLogs(p.Name, opts).Stream(ctx)
		if err != nil {
			return err
		}
		return errors.Join(copyScrubbed(w, body), body.Close())
	}
}

// metrics are files with the metrics of a pod's containers.
func (o *sysdumpOptions) metrics(p *corev1.Pod) (all []entry) {
	for _, c := range p.Spec.Containers {
		for _, port := range c.Ports {
			if port.Name != "metrics" || p.Status.Phase != corev1.PodRunning {
				continue
			}
			all = append(all, entry{path.Join("metrics", p.Namespace, p.Name+".txt"), metricsLimit, func(ctx context.Context, w io.Writer) error {
				body, err := o.on.core.CoreV1().RESTClient().Get().Namespace(p.Namespace).Resource("pods").Name(fmt.Sprint(p.Name, ":", port.ContainerPort)).
					SubResource("proxy").Suffix("metrics").SetHeader("Accept", "text/plain").Stream(ctx)
				if err != nil {
					return err
				}
				return errors.Join(copyScrubbed(w, body), body.Close())
			}})
		}
	}
	return all
}
