package preflight

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/version"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// oldest is the oldest Kubernetes with which Coil works.
var oldest = version.MajorMinor(1, 33)

// generation is which of the incompatible lines of Coil is there.
type generation int

const (
	nothing generation = iota
	coil1
	coil2   // Coil 2.x
	rewrite // this one
)

// installed is the Coil that is there.
type installed struct {
	generation generation
	image      string
	// chained says that it gives no addresses, since another network does.
	chained bool
}

func (i installed) String() string {
	return [...]string{"no Coil", "Coil v1", "Coil 2.x", "Coil"}[i.generation] + strings.TrimRight(" "+i.image, " ")
}

// fresh says whether no node has a coild.
func (i installed) fresh() bool { return i.generation < coil2 }

// Names of objects in kube-system.
const (
	nodeDaemon       = "coild"
	egressController = "coil-egress-controller"
	// labelGeneration is the number by which a DaemonSet knows pods of its present template, besides the hash.
	labelGeneration = "pod-template-generation"
)

// programs are the names of Coil's DaemonSets and Deployments, each with the ports that it opens in the network of its node.
var programs = map[string][]int32{
	nodeDaemon: {9384, 9385}, "coil-router": {9388, 9389},
	"coil-ipam-controller": {9386, 9387}, egressController: {9396, 9397}, "coil-lb-controller": {9398, 9399}, "coil-lb-agent": {9400, 9401},
}

// floatingPort is the port, of UDP and TCP, at which coilds ask each other who has floating addresses.
const floatingPort = 9391

// has says whether a DaemonSet or Deployment is part of a variant.
func (v Variant) has(program string) bool {
	switch program {
	case "coil-router":
		return strings.HasSuffix(string(v), "with-router")
	case "coil-lb-controller":
		return v == "with-services" || v == "with-gateways"
	case "coil-lb-agent":
		return v == "with-gateways"
	case "coil-ipam-controller":
		return v.Addresses()
	case egressController:
		return v.Egress()
	}
	return true
}

// workload is a DaemonSet or Deployment of Coil.
type workload struct {
	kind, name string
	replicas   *int32 // of a Deployment
	spec       corev1.PodSpec
}

// coils are Coil's DaemonSets and Deployments.
func (c Cluster) coils() (all []workload) {
	for _, d := range c.DaemonSets {
		if programs[d.Name] != nil {
			all = append(all, workload{"DaemonSet", d.Name, nil, d.Spec.Template.Spec})
		}
	}
	for _, d := range c.Deployments {
		if programs[d.Name] != nil {
			all = append(all, workload{"Deployment", d.Name, d.Spec.Replicas, d.Spec.Template.Spec})
		}
	}
	return all
}

// install tells the Coil that is there by its coild, or by a pod of one that was deleted without its pods. This version
// names the program by its place in the image; 2.x leaves that to PATH.
func (c Cluster) install() installed {
	var specs []corev1.PodSpec
	for _, w := range c.coils() {
		if w.name == nodeDaemon {
			specs = append(specs, w.spec)
		}
	}
	for _, p := range c.Pods {
		if ofCoil(p) && p.Labels["app.kubernetes.io/component"] == nodeDaemon {
			specs = append(specs, p.Spec)
		}
	}
	for _, s := range specs {
		for _, k := range s.Containers {
			if k.Name != nodeDaemon {
				continue
			}
			i := installed{coil2, k.Image, slices.Contains(k.Args, "--enable-ipam=false")}
			if len(k.Command) > 0 && k.Command[0] == "/coild" {
				i.generation = rewrite
			}
			return i
		}
	}
	if len(c.ones()) > 0 {
		return installed{generation: coil1}
	}
	return installed{}
}

// ones are the DaemonSets and Deployments of Coil v1.
func (c Cluster) ones() (all []string) {
	for _, d := range c.DaemonSets {
		if d.Name == "coil-node" {
			all = append(all, "DaemonSet "+d.Name)
		}
	}
	for _, d := range c.Deployments {
		if d.Name == "coil-controllers" {
			all = append(all, "Deployment "+d.Name)
		}
	}
	return all
}

// ofCoil says whether a pod is one of Coil's programs.
func ofCoil(p *corev1.Pod) bool {
	return p.Namespace == Namespace && p.Labels["app.kubernetes.io/name"] == "coil"
}

// same counts the nodes whose coild has the image that is to be installed.
func (j *judge) same() int {
	linux, nodes := sets.New(j.linux()...), sets.New[string]()
	for _, p := range j.Pods {
		if ofCoil(p) && p.Labels["app.kubernetes.io/component"] == nodeDaemon && linux.Has(p.Spec.NodeName) && hasImage(p.Spec, j.Image) {
			nodes.Insert(p.Spec.NodeName)
		}
	}
	return len(nodes)
}

// routersStay says whether routers have the image that is to be installed: it is that of their controller.
func (j *judge) routersStay() bool {
	return slices.ContainsFunc(j.coils(), func(w workload) bool { return w.name == egressController && hasImage(w.spec, j.Image) })
}

func hasImage(s corev1.PodSpec, image string) bool {
	return slices.ContainsFunc(s.Containers, func(c corev1.Container) bool { return c.Image == image })
}

// kubernetes judges the version of Kubernetes, webhooks and definitions.
func (j *judge) kubernetes() {
	subject := "Kubernetes " + j.Kubernetes
	if v, err := version.ParseGeneric(j.Kubernetes); err != nil {
		j.add(Unknown, subject, "its version can't be understood; Coil needs %s or later", oldest)
	} else if v.LessThan(oldest) {
		j.add(Blocker, subject, "Coil needs %s or later: upgrade Kubernetes first", oldest)
	}
	for _, w := range j.Webhooks {
		if slices.Contains(w.Groups, v2.GroupVersion.Group) || strings.HasPrefix(w.Name, "coilv2-") {
			j.add(Blocker, w.Kind+" "+w.Name, "it refuses every write of pools or Egresses as soon as its server, Coil 2.x, is gone: kubectl delete %s %s", strings.ToLower(w.Kind), w.Name)
		}
	}
	for _, d := range j.CRDs {
		if slices.ContainsFunc(d.Stored, func(v string) bool { return v != v2.GroupVersion.Version }) {
			j.add(Blocker, "CustomResourceDefinition "+d.Name, "objects may be stored in versions %s, but this Coil has %s only: with the Coil that is installed, write all of them again, then take the others out of status.storedVersions",
				strings.Join(d.Stored, ", "), v2.GroupVersion.Version)
		}
	}
}

// programs judges the Coil that is there.
func (j *judge) programs() {
	for _, subject := range j.ones() {
		j.add(Blocker, subject, "it is Coil v1: move its data first (coil-migrator dump)")
	}
	coils := j.coils()
	for _, w := range coils {
		if !j.Variant.has(w.name) {
			j.add(Warning, w.kind+" "+w.name, "it isn't part of what is to be installed (--variant), and stays as it is: delete it when nothing needs it")
		}
	}
	if j.installed.generation == coil2 && len(coils) > 0 {
		var names []string
		for _, w := range coils {
			names = append(names, strings.ToLower(w.kind)+"/"+w.name)
			for _, k := range w.spec.Containers {
				if len(k.Args) > 0 {
					j.add(Note, w.kind+" "+w.name, "carry over those of its flags that you set and that still mean something: %s", strings.Join(k.Args, " "))
				}
			}
		}
		j.add(Warning, "Coil 2.x", "delete its workloads (%s) before the new ones are applied, but not their pods, as manifests/README.md says: Coming from Coil 2.x, step 3", strings.Join(names, ", "))
	}
	for _, p := range j.Pods {
		if _, ok := p.Labels[labelGeneration]; ok && ofCoil(p) && metav1.GetControllerOf(p) == nil {
			j.add(Blocker, "Pod "+p.Namespace+"/"+p.Name, "a new DaemonSet takes it for one of its own, and it goes on running: kubectl -n %s label pod %s %s-", p.Namespace, p.Name, labelGeneration)
		}
	}
	j.versions()
	few := slices.ContainsFunc(coils, func(w workload) bool { return w.replicas != nil && *w.replicas < 2 })
	if len(j.linux()) == 1 && !few {
		j.add(Warning, "Node "+j.linux()[0], "it is the only one, and the two replicas of a controller never share a node: set replicas of the Deployments to 1 (manifests/README.md, Settings), else their updates stand still")
	}
}

// versions judges the distance between the version that is there and the one that is to be installed.
func (j *judge) versions() {
	this, err := version.ParseSemantic(strings.Split(j.This, " ")[0])
	if wanted, wantedErr := version.ParseSemantic(tag(j.Image)); wantedErr == nil {
		if err == nil && (wanted.LessThan(this) || this.LessThan(wanted)) {
			j.add(Warning, "Image "+j.Image, "this coil-migrator is of version %s, by whose rules it judges: ask the one of the image's version", j.This)
		}
		this, err = wanted, nil
	}
	tag := tag(j.installed.image)
	have, haveErr := version.ParseSemantic(tag)
	if j.installed.generation != rewrite || err != nil || haveErr != nil || have.Major() != this.Major() {
		return
	}
	subject := "Coil " + tag
	switch distance := int(this.Minor()) - int(have.Minor()); {
	case distance > 1:
		j.add(Blocker, subject, "only neighbouring minor versions run side by side during an update: install %d.%d first", have.Major(), have.Minor()+1)
	case distance < -1:
		j.add(Blocker, subject, "only neighbouring minor versions run side by side during an update: go back to %d.%d first", have.Major(), have.Minor()-1)
	case distance == -1 || distance == 0 && this.LessThan(have):
		j.add(Note, subject, "this goes back to an earlier version")
	}
}

// tag is the tag of an image; empty if it has none.
func tag(image string) string {
	_, tag, _ := strings.Cut(image[strings.LastIndex(image, "/")+1:], ":")
	tag, _, _ = strings.Cut(tag, "@")
	return tag
}

// config judges the network configuration that the Coil which is there gives to nodes; none gives it no configuration.
func (j *judge) config() {
	for _, m := range j.ConfigMaps {
		text, ok := m.Data["cni_netconf"]
		if !ok || text == "none" || j.installed.fresh() || m.Name != "coil-config" && !strings.HasPrefix(m.Name, "coil-config-") {
			continue
		}
		subject := fmt.Sprintf("ConfigMap %s", m.Name)
		var conf struct {
			CNIVersion string
			Plugins    []struct{ Type string }
		}
		if err := json.Unmarshal([]byte(text), &conf); err != nil {
			j.add(Warning, subject, "its cni_netconf can't be understood (%v): coil-installer will refuse it", err)
			continue
		}
		if v, err := version.ParseGeneric(conf.CNIVersion); err != nil || v.LessThan(version.MajorMinor(1, 1)) {
			j.add(Warning, subject, "its cniVersion is %q: with less than 1.1.0, runtimes never ask whether the network is ready", conf.CNIVersion)
		}
		var others []string
		for _, p := range conf.Plugins {
			if p.Type != "coil" {
				others = append(others, p.Type)
			}
		}
		if len(others) > 0 && j.installed.generation == coil2 {
			j.add(Note, subject, "carry over its other plugins: %s", strings.Join(others, ", "))
		}
	}
}
