package coilctl_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/klog/v2"
	"k8s.io/streaming/pkg/httpstream/wsstream"

	"github.com/coil-net/coil/pkg/app/coilctl"
)

// object is one of the API.
type object = map[string]any

// world is an API server that has objects of any kind, and pods that run programs.
type world struct {
	url string
	mu  sync.Mutex
	// objects are those of resources such as pods, which have kinds.
	objects map[string][]object
	kinds   map[string]string
	// refused are resources, or resources with a subresource, such as pods/exec, that nobody may ask for.
	refused map[string]bool
	// asked are the requests, such as "list pods".
	asked []string
	// run runs a command in a pod, and returns its exit code. It may be nil.
	run func(pod string, command []string, out, errOut io.Writer) int
	// sub answers about a subresource of a pod, or a path without objects. It may be nil.
	sub func(w http.ResponseWriter, r *http.Request, pod, subresource string)
	// before is called before each request, and says whether it has answered. It may be nil.
	before func(http.ResponseWriter, request) bool
	// write is called before a write, and may change objects as somebody else does. It may be nil.
	write func()
}

// newWorld starts one, which ends with the test.
func newWorld(t *testing.T) *world {
	t.Helper()
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	w := &world{objects: map[string][]object{}, refused: map[string]bool{}, kinds: map[string]string{
		"nodes": "Node", "pods": "Pod", "services": "Service", "namespaces": "Namespace", "events": "Event", "leases": "Lease", "endpointslices": "EndpointSlice",
		"daemonsets": "DaemonSet", "deployments": "Deployment", "addresspools": "AddressPool", "addressblocks": "AddressBlock", "blockrequests": "BlockRequest",
		"addressclaims": "AddressClaim", "egresses": "Egress", "egresspolicies": "EgressPolicy", "egressclusterpolicies": "EgressClusterPolicy", "loadbalancergateways": "LoadBalancerGateway",
	}}
	s := httptest.NewServer(w)
	t.Cleanup(s.Close)
	w.url = s.URL
	return w
}

// add adds objects, which are written as they are in JSON.
func (w *world) add(t *testing.T, resource string, objects ...any) {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, o := range objects {
		text, err := json.Marshal(o)
		var made object
		if err == nil {
			err = json.Unmarshal(text, &made)
		}
		if err != nil {
			t.Fatal(err)
		}
		meta := metaOf(made)
		if meta["uid"] == nil {
			meta["uid"] = fmt.Sprintf("uid-%v", meta["name"])
		}
		if meta["resourceVersion"] == nil {
			meta["resourceVersion"] = "1"
		}
		w.objects[resource] = append(w.objects[resource], made)
	}
}

// get returns an object, nil if it isn't there.
func (w *world) get(resource, name string) object {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.find(resource, "", name)
}

func (w *world) find(resource, namespace, name string) object {
	for _, o := range w.objects[resource] {
		if m := metaOf(o); m["name"] == name && (namespace == "" || m["namespace"] == namespace) {
			return o
		}
	}
	return nil
}

func metaOf(o object) object {
	m, ok := o["metadata"].(object)
	if !ok {
		m = object{}
		o["metadata"] = m
	}
	return m
}

// coilctl runs a command, with an input.
func (w *world) coilctl(input string, args ...string) (code int, out, errOut string) {
	var o, e bytes.Buffer
	code = coilctl.Main(append(append([]string{"coilctl"}, args...), "--server="+w.url), strings.NewReader(input), &o, &e)
	return code, o.String(), e.String()
}

// request is what a path asks for.
type request struct{ version, namespace, resource, name, sub string }

func parse(path string) (r request) {
	parts := strings.Split(strings.Trim(path, "/"), "/")
	switch {
	case parts[0] == "api" && len(parts) > 2:
		r.version, parts = parts[1], parts[2:]
	case parts[0] == "apis" && len(parts) > 3:
		r.version, parts = parts[1]+"/"+parts[2], parts[3:]
	default:
		return r
	}
	if parts[0] == "namespaces" && len(parts) > 2 {
		r.namespace, parts = parts[1], parts[2:]
	}
	r.resource = parts[0]
	if len(parts) > 1 {
		r.name = parts[1]
	}
	r.sub = strings.Join(parts[min(2, len(parts)):], "/")
	return r
}

// ServeHTTP implements http.Handler.
func (w *world) ServeHTTP(out http.ResponseWriter, in *http.Request) {
	r := parse(in.URL.Path)
	if w.before != nil && w.before(out, r) {
		return
	}
	verb := map[string]string{http.MethodGet: "get", http.MethodPatch: "patch", http.MethodDelete: "delete"}[in.Method]
	if r.name == "" && verb == "get" {
		verb = "list"
	}
	sub, _, _ := strings.Cut(r.sub, "/")
	what := strings.TrimSuffix(r.resource+"/"+sub, "/")
	w.mu.Lock()
	w.asked = append(w.asked, verb+" "+what)
	refuses, write := w.refused[what], w.write
	w.mu.Unlock()
	name, _, _ := strings.Cut(r.name, ":") // of a pod with a port
	switch {
	case refuses:
		status(out, http.StatusForbidden, "Forbidden", what+" is forbidden")
	case sub == "exec" && w.run != nil:
		w.exec(out, in, name)
	case (sub != "" || r.resource == "") && w.sub != nil:
		w.sub(out, in, name, r.sub)
	case sub != "" || w.kinds[r.resource] == "":
		status(out, http.StatusNotFound, "NotFound", in.URL.Path+" isn't there")
	case verb == "list":
		w.list(out, in, r)
	default:
		if verb != "get" && write != nil {
			write()
		}
		w.one(out, in, r, verb)
	}
}

func status(w http.ResponseWriter, code int, reason, message string) {
	answer(w, code, object{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code, "message": message})
}

func answer(w http.ResponseWriter, code int, o object) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(o)
}

// list answers with the objects that are selected.
func (w *world) list(out http.ResponseWriter, in *http.Request, r request) {
	w.mu.Lock()
	defer w.mu.Unlock()
	query := in.URL.Query()
	selector, err := labels.Parse(query.Get("labelSelector"))
	if err != nil {
		status(out, http.StatusBadRequest, "BadRequest", err.Error())
		return
	}
	items := []object{}
	for _, o := range w.objects[r.resource] {
		m := metaOf(o)
		has := labels.Set{}
		if all, ok := m["labels"].(object); ok {
			for k, v := range all {
				has[k] = fmt.Sprint(v)
			}
		}
		if (r.namespace == "" || m["namespace"] == r.namespace) && selector.Matches(has) && selected(o, query.Get("fieldSelector")) {
			items = append(items, o)
		}
	}
	answer(out, http.StatusOK, object{"kind": w.kinds[r.resource] + "List", "apiVersion": r.version, "metadata": object{"resourceVersion": "1"}, "items": items})
}

// selected says whether an object has the values of a field selector.
func selected(o object, selector string) bool {
	for term := range strings.SplitSeq(selector, ",") {
		path, want, ok := strings.Cut(term, "=")
		var v any = o
		for step := range strings.SplitSeq(path, ".") {
			m, _ := v.(object)
			v = m[step]
		}
		if ok && v != want {
			return false
		}
	}
	return true
}

// one reads, patches or deletes an object, with preconditions.
func (w *world) one(out http.ResponseWriter, in *http.Request, r request, verb string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	o := w.find(r.resource, r.namespace, r.name)
	if o == nil {
		status(out, http.StatusNotFound, "NotFound", r.resource+" "+r.name+" isn't there")
		return
	}
	m := metaOf(o)
	var body object
	if verb != "get" {
		_ = json.NewDecoder(in.Body).Decode(&body)
		wants, _ := body["preconditions"].(object)
		if verb == "patch" {
			wants = metaOf(body)
		}
		for _, k := range []string{"uid", "resourceVersion"} {
			if v := wants[k]; v != nil && v != m[k] {
				status(out, http.StatusConflict, "Conflict", k+" isn't "+fmt.Sprint(v))
				return
			}
		}
		m["resourceVersion"] = fmt.Sprint(m["resourceVersion"], "1")
	}
	switch verb {
	case "patch":
		if f, ok := metaOf(body)["finalizers"]; ok {
			m["finalizers"] = f
		}
	case "delete":
		m["deletionTimestamp"] = "2026-01-02T03:04:05Z"
	}
	if all, _ := m["finalizers"].([]any); m["deletionTimestamp"] != nil && len(all) == 0 {
		w.objects[r.resource] = slices.DeleteFunc(w.objects[r.resource], func(x object) bool { return metaOf(x)["name"] == r.name })
	}
	o = maps.Clone(o)
	o["kind"], o["apiVersion"] = w.kinds[r.resource], r.version
	answer(out, http.StatusOK, o)
}

// exec runs a command as kubelet does: each stream has a channel, and the last one tells the exit code.
func (w *world) exec(out http.ResponseWriter, in *http.Request, pod string) {
	channels := []wsstream.ChannelType{wsstream.IgnoreChannel, wsstream.WriteChannel, wsstream.WriteChannel, wsstream.WriteChannel, wsstream.IgnoreChannel}
	conn := wsstream.NewConn(map[string]wsstream.ChannelProtocolConfig{
		"v5.channel.k8s.io": {Binary: true, Channels: channels}, "v4.channel.k8s.io": {Binary: true, Channels: channels},
	})
	_, streams, err := conn.Open(out, in.WithContext(klog.NewContext(in.Context(), klog.Logger{}))) // it logs each connection that has ended
	if err != nil {
		return
	}
	defer conn.Close()
	code := w.run(pod, in.URL.Query()["command"], streams[1], streams[2])
	ended := object{"status": "Success"}
	if code != 0 {
		ended = object{"status": "Failure", "reason": "NonZeroExitCode", "message": fmt.Sprint("command terminated with exit code ", code), "details": object{
			"causes": []object{{"reason": "ExitCode", "message": fmt.Sprint(code)}},
		}}
	}
	_ = json.NewEncoder(streams[3]).Encode(ended)
}
