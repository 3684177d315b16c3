package coilctl_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/testkit"
)

// nodeWorld has the node n1 with its coild, a pool, a block and a pod, which agree with the record.
func nodeWorld(t *testing.T) (*world, *inspection.Database) {
	t.Helper()
	w := newWorld(t)
	ready := []object{{"type": "Ready", "status": "True"}}
	w.add(t, "nodes", object{"metadata": object{"name": "n1", "uid": "uid-n1"}, "status": object{"conditions": ready}})
	w.add(t, "pods",
		object{
			"metadata": object{"namespace": "kube-system", "name": "coild-x", "labels": object{"app.kubernetes.io/name": "coil", "app.kubernetes.io/component": "coild"}},
			"spec":     object{"nodeName": "n1", "hostNetwork": true, "containers": []object{{"name": "coild", "ports": []object{{"name": "metrics", "containerPort": 9384}}}}},
			"status":   object{"phase": "Running", "conditions": ready, "podIPs": []object{{"ip": "172.16.0.1"}}},
		},
		object{
			"metadata": object{"namespace": "shop", "name": "cart-0", "uid": "uid-cart-0"}, "spec": object{"nodeName": "n1"},
			"status": object{"phase": "Running", "podIPs": []object{{"ip": "10.0.0.0"}}},
		})
	w.add(t, "addresspools", object{"metadata": object{"name": "default"}, "spec": object{"blockSizeBits": 2, "subnets": []object{{"ipv4": "10.0.0.0/24"}}}})
	w.add(t, "addressblocks", object{
		"metadata": object{"name": "default-0", "labels": object{"coil.cybozu.com/pool": "default", "coil.cybozu.com/node": "n1"}, "finalizers": []string{"coil.cybozu.com/ipam"}}, "index": 0, "ipv4": "10.0.0.0/30",
	})
	d := &inspection.Database{
		Node: inspection.Node{Name: "n1", IPAM: true}, Schema: 2, Newest: 2, Damage: []string{}, Meta: map[string]string{"node_name": "n1", "node_uid": "uid-n1", "rebuilt_at": "x", "created_at": "y"},
		Blocks: []inspection.DatabaseBlock{{ID: 1, Name: "default-0", Pool: "default", IPv4: "10.0.0.0/30"}},
		Addresses: []inspection.DatabaseAddress{{
			ID: 1, IPv4: "10.0.0.0", State: "attached", Since: "2026-01-02T03:04:05.000Z", Pool: "default", Block: "default-0", BlockID: 1, Namespace: "shop", Pod: "cart-0", PodUID: "uid-cart-0",
		}},
	}
	w.run = func(pod string, command []string, out, errOut io.Writer) int {
		if pod != "coild-x" || !slices.Equal(command, []string{"/coild", "debug", "record"}) {
			t.Errorf("pod %s was to run %q", pod, command)
			return 2
		}
		_, err := out.Write(testkit.Must(d.Write(inspection.DatabaseLimit, func(string) bool { return false }))(t))
		fmt.Fprintln(errOut, "I0102 Starting", err)
		return 0
	}
	return w, d
}

// The record of a node that agrees with everything has no fault, and one that doesn't has its fault with what to do about it, and exit code 1.
func TestDBCheck(t *testing.T) {
	w, d := nodeWorld(t)
	code, out, errOut := w.coilctl("", "db", "check", "n1")
	if code != 0 || errOut != "" || strings.Count(out, "\nok ") != 9 || !strings.HasPrefix(out, "Record of node n1\n") {
		t.Errorf("a sound record: exit code %d\n%s%s", code, out, errOut)
	}
	want := []string{"get nodes", "get pods/exec", "list addressblocks", "list addresspools", "list pods", "list pods"}
	if slices.Sort(w.asked); !slices.Equal(w.asked, want) {
		t.Errorf("it asks for %q, want %q", w.asked, want)
	}
	if _, help, _ := w.coilctl("", "db", "check", "--help"); !strings.Contains(help, "Rights: list pods; list addressblocks, addresspools of coil.cybozu.com; get nodes; get and create pods/exec") {
		t.Errorf("the help doesn't name the rights:\n%s", help)
	}
	d.Addresses[0].Pod = "gone"
	code, out, errOut = w.coilctl("", "db", "check", "n1")
	if code != 1 || errOut != "error: something is wrong\n" || !strings.Contains(out, "WRONG  pods       10.0.0.0 is of pod shop/gone (attached), and there is no such pod on the node\n") ||
		!strings.Contains(out, "-> if a sandbox of it runs") || !strings.Contains(out, "WRONG  lacking    pod shop/cart-0 has 10.0.0.0, which the record has for pod shop/gone") {
		t.Errorf("a record with a fault: exit code %d\n%s%s", code, out, errOut)
	}
	w.refused["pods/exec"] = true
	if code, out, errOut = w.coilctl("", "db", "check", "n1"); code != 0 || !strings.Contains(out, "?      file       coild doesn't tell its record: ") {
		t.Errorf("without the right to exec: exit code %d\n%s%s", code, out, errOut)
	}
}

// A copy is written when it has come whole, and never over another file unless that is asked for. Nothing else is left in the folder.
func TestDBDump(t *testing.T) {
	w, _ := nodeWorld(t)
	file := bytes.Repeat([]byte("SQLite format 3\x00"), 1<<15)
	sha := sha256.Sum256(file)
	sum := inspection.Sum{Bytes: int64(len(file)), SHA256: hex.EncodeToString(sha[:])}.String()
	says, sends, exit := sum, file, 0
	rows := w.run
	w.run = func(pod string, command []string, out, errOut io.Writer) int {
		if command[2] == "record" {
			return rows(pod, command, out, errOut)
		}
		for part := range slices.Chunk(sends, 64<<10) {
			_, _ = out.Write(part)
		}
		fmt.Fprintf(errOut, "I0102 Starting\n%s\nI0102 Ended\n", says)
		return exit
	}
	dir := t.TempDir()
	path := filepath.Join(dir, "n1.db")
	for _, tt := range []struct {
		name   string
		do     func()
		args   string
		errOut string
		code   int
		files  string
	}{
		{"cut short", func() { sends = file[:len(file)-1] }, "-f " + path, "the copy isn't whole, try again", 1, ""},
		{"changed", func() { sends = append([]byte("x"), file[1:]...) }, "-f " + path, "the copy isn't whole, try again", 1, ""},
		{"without sum", func() { sends, says = file, "" }, "-f " + path, "the copy can't be checked", 1, ""},
		{"refused by coild", func() { says, exit = "coild debug: disk has too little room for a copy", 1 }, "-f " + path, "terminated with exit code 1", 1, ""},
		{"whole", func() { says, exit = sum, 0 }, "-f " + path, path + " has the record of node n1\n", 0, "n1.db"},
		{"over a file", func() {}, "-f " + path, path + " is there already: use another name, or --force", 1, "n1.db"},
		{"over a file by force", func() {}, "--force -f " + path, path + " has the record of node n1\n", 0, "n1.db"},
		{"into a folder that isn't there", func() {}, "-f " + dir + "/no/n1.db", "no such file or directory", 1, "n1.db"},
	} {
		tt.do()
		code, out, errOut := w.coilctl("", append([]string{"db", "dump", "n1"}, strings.Fields(tt.args)...)...)
		files := testkit.FilesIn(t, dir)
		if code != tt.code || out != "" || !strings.Contains(errOut, tt.errOut) || strings.Join(files, " ") != tt.files {
			t.Errorf("%s: exit code %d, %q, files %q", tt.name, code, errOut, files)
		}
	}
	if got := testkit.Must(os.ReadFile(path))(t); !bytes.Equal(got, file) {
		t.Errorf("the file has %d other bytes", len(got))
	}
	if st := testkit.Must(os.Stat(path))(t); st.Mode() != 0o600 {
		t.Errorf("the file has mode %s", st.Mode())
	}
	if code, out, errOut := w.coilctl("", "db", "dump", "n1", "-f", "-"); code != 0 || out != string(file) || errOut != "" {
		t.Errorf("to the standard output: exit code %d, %d bytes, %s", code, len(out), errOut)
	}
	code, out, errOut := w.coilctl("", "db", "dump", "n1", "-o", "json")
	d, err := inspection.ParseDatabase([]byte(out))
	if code != 0 || errOut != "" || err != nil || len(d.Addresses) != 1 || d.Addresses[0].Pod != "cart-0" {
		t.Errorf("as JSON: exit code %d, %s, %v\n%s", code, errOut, err, out)
	}
	if code, _, errOut = w.coilctl("", "db", "dump", "n2"); code != 1 || errOut != "error: no pod of coild runs on node n2: see coilctl why node n2\n" {
		t.Errorf("of a node without coild: exit code %d, %s", code, errOut)
	}
	w.asked = nil
	w.coilctl("", "db", "dump", "n1", "-f", "-")
	if diff := cmp.Diff([]string{"list pods", "get pods/exec"}, w.asked); diff != "" {
		t.Errorf("it asks for: %s", diff)
	}
}
