package cluster

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/integration/guide"
	lab "github.com/coil-net/coil/integration/lab/cluster"
	"github.com/coil-net/coil/integration/lab/image"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// proxySocket returns a unix socket that leads to a proxy until the test ends: kube-apiserver speaks to one by TCP only with certificates.
func proxySocket(t *testing.T, proxy netip.AddrPort) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "kubelets")
	l := testkit.Must(net.Listen("unix", path))(t)
	t.Cleanup(func() { l.Close() })
	go netlab.Serve(l, func(c net.Conn) {
		up, err := net.Dial("tcp", proxy.String())
		if err != nil {
			return // kube-apiserver tells that
		}
		defer up.Close()
		both(c, c, up)
	})
	return path
}

// proxyKubelets has kube-apiserver, which is outside of the machine, reach kubelets until the test ends: by the method CONNECT of HTTP, at the fabric.
func proxyKubelets(t *testing.T, s *site) {
	t.Helper()
	fabric := testkit.Must(netlab.Open(testkit.Must(s.NetNS(lab.Fabric))(t)))(t)
	t.Cleanup(func() { fabric.Close() })
	l := testkit.Must(fabric.Listen(t.Context(), "tcp4", ":"+os.Getenv(proxyEnv)))(t)
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodConnect {
			http.Error(w, "only CONNECT leads to kubelets", http.StatusMethodNotAllowed)
			return
		}
		kubelet, err := fabric.Dial(r.Context(), "tcp", r.Host)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		defer kubelet.Close()
		w.WriteHeader(http.StatusOK)
		client, buffered, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return // it has gone
		}
		defer client.Close()
		both(client, buffered, kubelet)
	})}
	var serves sync.WaitGroup
	serves.Go(func() { _ = server.Serve(l) }) // ends by Close
	t.Cleanup(func() {
		server.Close()
		serves.Wait()
	})
}

// both copies between a client and a server until both have ended. Bytes of the client that were read already come first out of from.
func both(client net.Conn, from io.Reader, server net.Conn) {
	var work sync.WaitGroup
	work.Go(func() { forward(server, from) })
	work.Go(func() { forward(client, server) })
	work.Wait()
}

// forward copies one direction of a connection, and closes that direction at its end. The copy ends without an error if the connection breaks.
func forward(to net.Conn, from io.Reader) {
	_, _ = io.Copy(to, from)
	if c, ok := to.(interface{ CloseWrite() error }); ok {
		_ = c.CloseWrite()
	}
}

// operator returns a shell with kubectl and coilctl for the cluster.
func operator(t *testing.T, s *site) *guide.Shell {
	t.Helper()
	return guide.NewShell(t, testkit.Must(s.KubectlCommand(t.Context()))(t).Path, s.Kubeconfig())
}

// patient has coilctl wait longer for programs that are emulated.
var patient = strings.NewReplacer("coilctl why ", "coilctl why --timeout=2m ", "coilctl trace ", "coilctl trace --timeout=2m ")

// testLooks has coilctl ask coild and routers, by kubelets and the container runtime: about a client with tunnels, a pod that has none, a router, and the record of the node.
func testLooks(t *testing.T, s *site) {
	o := operator(t, s)
	router := s.routers(t, 1)[0]
	chosen := testkit.Must(s.core.CoreV1().Pods("clients").Get(t.Context(), "chosen", metav1.GetOptions{}))(t)
	for _, c := range []struct {
		command string
		prints  []string
	}{
		{"coilctl why pod clients/chosen", []string{"Pod clients/chosen", "ok record", "ok tunnels", "ok peers 1 router has the tunnel"}},
		{"coilctl trace clients/chosen " + servers[0].String() + ":" + serverPort, []string{"From Pod clients/chosen to", "1 pod clients/chosen", "4 router internet/" + router.Name, "The destination sees " + router.Status.PodIPs[0].IP}},
		{fmt.Sprintf("coilctl trace clients/other [%s]:%s", servers[1], serverPort), []string{"The destination sees"}},
		{"coilctl why pod internet/" + router.Name, []string{"Pod internet/" + router.Name, "ok policies the pod is a router of Egress internet/nat"}},
		{"coilctl db check " + chosen.Spec.NodeName, []string{"Record of node", "ok"}},
		{"coilctl db dump " + chosen.Spec.NodeName + " -f node.db && sqlite3 -readonly node.db 'SELECT name, ipv4, ipv6 FROM pods'", []string{"chosen|" + chosen.Status.PodIPs[0].IP + "|" + chosen.Status.PodIPs[1].IP}},
	} {
		c.command = patient.Replace(c.command)
		out, err := o.Run(t.Context(), c.command)
		t.Logf("%s\n%s%v", c.command, out, err)
		if err != nil {
			t.Errorf("%s: %v\n%s", c.command, err, out)
		}
		guide.Step{Commands: c.command, Prints: c.prints}.Check(t, string(out))
	}
}

// testFirstHour follows the way out of FIRST-HOUR.md, with names that other tests don't use.
func testFirstHour(t *testing.T, s *site) {
	_, steps := guide.Read(t, "FIRST-HOUR.md", "\n## A way out\n", "\n## All of it on one page\n")
	o := operator(t, s)
	s.apply(t, "{apiVersion: v1, kind: Namespace, metadata: {name: first-hour}}")
	for _, step := range steps {
		step = step.Renamed(strings.NewReplacer("busybox:1.37", image.Tools, "partners", "hour", "internet", "hour-out"))
		step.Commands = patient.Replace(step.Commands)
		look := func() error {
			out, err := o.Run(t.Context(), step.Commands)
			t.Logf("%s\n%s", step.Commands, out)
			if lacks := step.Missing(string(out)); err == nil && lacks != "" {
				err = fmt.Errorf("the page has %q", lacks)
			}
			return err
		}
		if step.Place == "fou" { // an emulated coild may not answer in its time
			testkit.Eventually(t, 60*time.Second, "the pod's way out is told", look)
		} else {
			testkit.Check(t, look())
		}
	}
}
