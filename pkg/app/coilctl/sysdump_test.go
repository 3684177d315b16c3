package coilctl_test

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/testkit"
)

const leaked = "hunter22" // a secret that no archive has

// dumpWorld adds what a cluster has beside the node n1, with secrets in many places.
func dumpWorld(t *testing.T) *world {
	t.Helper()
	w, _ := nodeWorld(t)
	record := w.run
	w.run = func(pod string, command []string, out, errOut io.Writer) int {
		if command[2] == "node" {
			fmt.Fprintln(out, `{"question":"node"}`)
			return 0
		}
		return record(pod, command, out, errOut)
	}
	coil := func(component string) object {
		return object{"app.kubernetes.io/name": "coil", "app.kubernetes.io/component": component}
	}
	secret := object{"kubectl.kubernetes.io/last-applied-configuration": leaked, "example.com/token": leaked}
	w.add(t, "nodes", object{"metadata": object{"name": "n2", "annotations": secret}, "status": object{"images": []object{{"names": []string{"image-of-others"}}}, "nodeInfo": object{"kernelVersion": "6.12"}}})
	w.add(t, "pods",
		object{
			"metadata": object{"namespace": "kube-system", "name": "coild-y", "labels": coil("coild"), "ownerReferences": []object{{"kind": "DaemonSet", "name": "coild"}}},
			"spec":     object{"nodeName": "n2", "containers": []object{{"name": "coild", "image": "coil:v3"}}}, "status": object{"phase": "Pending"},
		},
		object{
			"metadata": object{"namespace": "kube-system", "name": "coil-ipam-controller-0", "labels": coil("coil-ipam-controller"), "annotations": secret},
			"spec": object{"nodeName": "n3", "containers": []object{{
				"name": "controller", "image": "coil:v3", "args": []string{"--password=" + leaked}, "env": []object{{"name": "PASSWORD", "value": leaked}}, "ports": []object{{"name": "metrics", "containerPort": 9386}},
			}}},
			"status": object{"phase": "Running", "containerStatuses": []object{{"name": "controller", "restartCount": 2}}},
		},
		object{
			"metadata": object{"namespace": "shop", "name": "web", "annotations": secret}, "status": object{"phase": "Running", "podIPs": []object{{"ip": "10.0.0.1"}}},
			"spec": object{"nodeName": "n1", "containers": []object{{"name": "c", "command": []string{leaked}, "env": []object{{"name": "PASSWORD", "value": leaked}}}}},
		})
	w.add(t, "services", object{"metadata": object{"namespace": "internet", "name": "nat", "labels": coil("egress")}}, object{"metadata": object{"namespace": "shop", "name": "of-others"}})
	w.add(t, "events",
		object{"metadata": object{"namespace": "shop", "name": "a"}, "reason": "FailedCreatePodSandBox", "message": "Authorization: Bearer " + leaked + leaked, "involvedObject": object{"kind": "Pod"}},
		object{"metadata": object{"namespace": "shop", "name": "of-others"}, "involvedObject": object{"kind": "Pod"}})
	w.add(t, "leases", object{"metadata": object{"namespace": "kube-system", "name": "coil-ipam-controller"}}, object{"metadata": object{"namespace": "kube-system", "name": "of-others"}})
	w.add(t, "namespaces", object{"metadata": object{"name": "shop", "annotations": secret}})
	w.sub = func(out http.ResponseWriter, in *http.Request, pod, sub string) {
		switch q := in.URL.Query(); {
		case in.URL.Path == "/version":
			fmt.Fprint(out, `{"gitVersion":"v1.37.2"}`)
		case sub == "log":
			fmt.Fprintf(out, "log of %s %s, previous %q, since %s\ntoken=%s\nend", pod, q.Get("container"), q.Get("previous"), q.Get("sinceSeconds"), leaked)
		case sub == "proxy/metrics":
			fmt.Fprintf(out, "coil_metric_of_%s 1\n", pod)
		default:
			status(out, http.StatusNotFound, "NotFound", "no "+in.URL.Path)
		}
	}
	return w
}

// unpack reads an archive: the names of its files in order, and their contents.
func unpack(t *testing.T, path string) (names []string, files map[string]string) {
	t.Helper()
	f := testkit.Must(os.Open(path))(t)
	defer f.Close()
	files = map[string]string{}
	for r := tar.NewReader(testkit.Must(gzip.NewReader(f))(t)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return names, files
		}
		testkit.Check(t, err)
		name, ok := strings.CutPrefix(h.Name, "coil-sysdump/")
		if !ok {
			t.Errorf("%s isn't in the folder", h.Name)
		}
		names, files[name] = append(names, name), string(testkit.Must(io.ReadAll(r))(t))
	}
}

// An archive has its files in the same order each time, all that there is of Coil, and no secret.
func TestSysdump(t *testing.T) {
	w := dumpWorld(t)
	dir := t.TempDir()
	path := filepath.Join(dir, "a.tar.gz")
	code, out, errOut := w.coilctl("", "sysdump", "--since=15m", "-f", path)
	if code != 0 || out != "" || !strings.Contains(errOut, path+" has 29 whole files; 2 things couldn't be read") {
		t.Errorf("exit code %d, %s%s", code, out, errOut)
	}
	names, files := unpack(t, path)
	want := strings.Fields(`README.txt versions.yaml status.txt
		objects/addresspools.yaml objects/addressblocks.yaml objects/blockrequests.yaml objects/addressclaims.yaml objects/egresses.yaml objects/egresspolicies.yaml objects/egressclusterpolicies.yaml
		objects/loadbalancergateways.yaml objects/nodes.yaml objects/namespaces.yaml objects/pods.yaml objects/daemonsets.yaml objects/deployments.yaml objects/services.yaml objects/endpointslices.yaml
		objects/leases.yaml objects/events.yaml nodes/n1/pods.yaml nodes/n1/coild.json nodes/n1/record.json nodes/n2/pods.yaml
		logs/kube-system/coil-ipam-controller-0/controller.log logs/kube-system/coil-ipam-controller-0/controller.previous.log logs/kube-system/coild-x/coild.log logs/kube-system/coild-y/coild.log
		metrics/kube-system/coil-ipam-controller-0.txt metrics/kube-system/coild-x.txt errors.txt index.txt`)
	if d := cmp.Diff(want, names); d != "" {
		t.Errorf("files (-want +got):\n%s", d)
	}
	for name, text := range files {
		if strings.Contains(text, leaked) || strings.Contains(text, "of-others") {
			t.Errorf("%s has what it must not:\n%s", name, text)
		}
	}
	for name, part := range map[string]string{
		"versions.yaml": "gitVersion: v1.37.2", "status.txt": "AddressPool  ", "objects/addresspools.yaml": "name: default", "objects/egresses.yaml": "# end", "objects/services.yaml": "name: nat",
		"objects/events.yaml": "Bearer REMOVED", "objects/pods.yaml": "value: REMOVED", "objects/leases.yaml": "coil-ipam-controller", "nodes/n1/pods.yaml": "ip: 10.0.0.1", "nodes/n1/coild.json": `"question"`,
		"nodes/n1/record.json": `"node_uid":"uid-n1"`, "metrics/kube-system/coild-x.txt": "coil_metric_of_coild-x 1", "logs/kube-system/coild-x/coild.log": "log of coild-x coild, previous \"\", since 900\ntoken=REMOVED\nend",
		"logs/kube-system/coil-ipam-controller-0/controller.previous.log": `previous "true", since ` + "\n", "index.txt": "objects/nodes.yaml",
	} {
		if !strings.Contains(files[name], part) {
			t.Errorf("%s hasn't %q:\n%s", name, part, files[name])
		}
	}
	if want := "nodes/n2/coild.json: no pod of coild runs on the node\nnodes/n2/record.json: no pod of coild runs on the node\n"; files["errors.txt"] != want {
		t.Errorf("errors.txt: %q", files["errors.txt"])
	}
	if st := testkit.Must(os.Stat(path))(t); st.Mode() != 0o600 {
		t.Errorf("the archive has mode %s", st.Mode())
	}
	if code, _, errOut := w.coilctl("", "sysdump", "-f", path); code != 1 || !strings.Contains(errOut, "is there already") {
		t.Errorf("over a file: exit code %d, %s", code, errOut)
	}
	again := filepath.Join(dir, "b.tar.gz")
	w.coilctl("", "sysdump", "--since=15m", "-f", again)
	twice, same := unpack(t, again)
	delete(files, "versions.yaml") // which has the time
	delete(same, "versions.yaml")
	if d := cmp.Diff(names, twice) + cmp.Diff(files, same); d != "" {
		t.Errorf("the second time it differs: %s", d)
	}
	for _, asked := range w.asked {
		if strings.Contains(asked, "secrets") || strings.Contains(asked, "configmaps") {
			t.Errorf("it asks for %s", asked)
		}
	}
}

// Nodes are chosen; those that aren't read are named.
func TestSysdumpNodes(t *testing.T) {
	w := dumpWorld(t)
	for i, tt := range []struct{ args, nodes, errors string }{
		{"--node=n2 --node=n7", "n2", "nodes/n7: there is no such Node"},
		{"--max-nodes=1", "n2", "nodes: 1 of 2 nodes are left out"}, // n2 isn't ready
		{"--max-nodes=0", "", "nodes: 2 of 2 nodes are left out"},
	} {
		path := filepath.Join(t.TempDir(), fmt.Sprint(i))
		code, _, errOut := w.coilctl("", append([]string{"sysdump", "-f", path}, strings.Fields(tt.args)...)...)
		names, files := unpack(t, path)
		var nodes []string
		for _, name := range names {
			if parts := strings.Split(name, "/"); parts[0] == "nodes" {
				nodes = append(nodes, parts[1])
			}
		}
		if nodes = slices.Compact(nodes); code != 0 || strings.Join(nodes, " ") != tt.nodes || !strings.Contains(files["errors.txt"], tt.errors) {
			t.Errorf("%s: exit code %d, nodes %q, %s%s", tt.args, code, nodes, files["errors.txt"], errOut)
		}
	}
}

// A missing right is told, and doesn't end the dump. Without any right there is nothing, and no file.
func TestSysdumpRights(t *testing.T) {
	w := dumpWorld(t)
	for _, what := range []string{"pods/exec", "pods/log", "pods/proxy", "events", "egresses"} {
		w.refused[what] = true
	}
	path := filepath.Join(t.TempDir(), "a.tar.gz")
	code, _, errOut := w.coilctl("", "sysdump", "-f", path)
	names, files := unpack(t, path)
	if code != 0 || slices.Contains(names, "objects/events.yaml") || !slices.Contains(names, "objects/leases.yaml") || !strings.Contains(files["status.txt"], "AddressPool ") {
		t.Errorf("exit code %d, %q, %s", code, names, errOut)
	}
	for _, part := range []string{
		"objects/events.yaml: events is forbidden", "status.txt: list egresses: egresses is forbidden", "logs/kube-system/coild-x/coild.log: pods/log is forbidden", "metrics/kube-system/coild-x.txt: pods/proxy is forbidden",
		"nodes/n1/record.json: exec in pod kube-system/coild-x: ",
	} {
		if !strings.Contains(files["errors.txt"], part) {
			t.Errorf("errors.txt hasn't %q:\n%s", part, files["errors.txt"])
		}
	}
	for resource := range w.kinds {
		w.refused[resource] = true
	}
	w.sub = func(out http.ResponseWriter, _ *http.Request, _, _ string) {
		status(out, http.StatusForbidden, "Forbidden", "no right")
	}
	path = filepath.Join(t.TempDir(), "b.tar.gz")
	code, _, errOut = w.coilctl("", "sysdump", "-f", path)
	if _, err := os.Stat(path); code != 1 || !strings.Contains(errOut, "error: nothing could be read: ") || !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without rights: exit code %d, %s, %v", code, errOut, err)
	}
}

// What hangs ends when the time is over or somebody interrupts, and the archive has what there is.
func TestSysdumpEnds(t *testing.T) {
	for name, interrupted := range map[string]bool{"time is over": false, "interrupted": true} {
		t.Run(name, func(t *testing.T) {
			w := dumpWorld(t)
			answer := w.sub
			interrupt := sync.OnceValue(func() error { return syscall.Kill(os.Getpid(), syscall.SIGINT) }) // a later one may come when nobody catches it
			w.sub = func(out http.ResponseWriter, in *http.Request, pod, sub string) {
				if sub != "log" {
					answer(out, in, pod, sub)
					return
				}
				if interrupted {
					if err := interrupt(); err != nil {
						t.Error(err)
					}
				}
				<-in.Context().Done()
			}
			caught := make(chan os.Signal, 10)
			signal.Notify(caught, os.Interrupt) // the command may have ended itself, and the process must not
			defer signal.Stop(caught)
			path := filepath.Join(t.TempDir(), "a.tar.gz")
			timeout := map[bool]time.Duration{true: time.Hour, false: testkit.Timeout(4 * time.Second)}[interrupted]
			code, _, errOut := w.coilctl("", "sysdump", "-f", path, "--timeout="+timeout.String())
			says := map[bool]string{true: "error: interrupted: " + path + " has what was read until then", false: "couldn't be read"}[interrupted]
			if want := map[bool]int{true: 1, false: 0}[interrupted]; code != want || !strings.Contains(errOut, says) {
				t.Errorf("exit code %d, %s", code, errOut)
			}
			names, files := unpack(t, path)
			if !slices.Contains(names, "objects/addresspools.yaml") || !slices.Contains(names, "index.txt") || !strings.Contains(files["errors.txt"], "files weren't read: ") {
				t.Errorf("%q\n%s", names, files["errors.txt"])
			}
		})
	}
}
