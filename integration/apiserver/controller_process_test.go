package apiserver

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// replica is a process of coil-ipam-controller.
type replica struct {
	name            string
	cmd             *exec.Cmd
	metrics, health string
	kill            func()
	ended           chan error // the result of the process
}

// start starts the program as its container does, with the rights of its account.
func (c *cluster) start(t *testing.T, name string, flags ...string) *replica {
	t.Helper()
	bin := testkit.Must((&build.Builder{Log: os.Stderr}).Own(t.Context(), "cmd/coil-ipam-controller"))(t)
	r := &replica{name: name, metrics: testkit.FreeAddr(t), health: testkit.FreeAddr(t)}
	r.cmd = exec.Command(bin, append([]string{
		"--kubeconfig=" + writeKubeconfig(t, c.serviceAccount(t)), "--metrics-addr=" + r.metrics, "--health-addr=" + r.health,
		"--leader-election-lease-duration=3s", "--leader-election-renew-deadline=2s", "--leader-election-retry-period=300ms",
	}, flags...)...)
	r.cmd.Env = append(os.Environ(), "COIL_POD_NAME="+name)
	r.cmd.Stdout, r.cmd.Stderr = os.Stderr, os.Stderr
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	r.ended = make(chan error, 1)
	exited := make(chan struct{})
	go func() { r.ended <- r.cmd.Wait(); close(exited) }()
	r.kill = sync.OnceFunc(func() {
		if err := r.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
			t.Errorf("kill %s: %v", name, err)
		}
		<-exited
	})
	t.Cleanup(r.kill)
	return r
}

func writeKubeconfig(t *testing.T, cfg *rest.Config) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	k := clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{"c": {Server: cfg.Host, CertificateAuthority: cfg.CAFile, CertificateAuthorityData: cfg.CAData}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{"u": {ClientCertificateData: cfg.CertData, ClientKeyData: cfg.KeyData}},
		Contexts:       map[string]*clientcmdapi.Context{"x": {Cluster: "c", AuthInfo: "u"}},
		CurrentContext: "x",
	}
	if err := clientcmd.WriteToFile(k, path); err != nil {
		t.Fatal(err)
	}
	return path
}

func (r *replica) requireReady(t *testing.T) {
	t.Helper()
	testkit.Eventually(t, 20*time.Second, r.name+" is ready", func() error {
		_, err := netlab.Get(t.Context(), http.DefaultClient, "http://"+r.health+"/readyz")
		return err
	})
}

// leader returns the replica that leads.
func (c *cluster) leader(t *testing.T, rs ...*replica) (leads, standby *replica) {
	t.Helper()
	testkit.Eventually(t, 20*time.Second, "a leader", func() error {
		l, err := c.core.CoordinationV1().Leases("kube-system").Get(t.Context(), "coil-ipam-leader", metav1.GetOptions{})
		if err != nil {
			return err
		}
		for i, r := range rs {
			if l.Spec.HolderIdentity != nil && strings.HasPrefix(*l.Spec.HolderIdentity, r.name+"_") {
				leads, standby = r, rs[len(rs)-1-i]
				return nil
			}
		}
		return fmt.Errorf("the holder is %v", l.Spec.HolderIdentity)
	})
	return leads, standby
}

// answered counts the requests that have an answer.
func (c *cluster) answered(t *testing.T) int {
	t.Helper()
	n := 0
	for _, r := range testkit.Must(c.coil.CoilV2().BlockRequests().List(t.Context(), metav1.ListOptions{}))(t).Items {
		if len(r.Status.Conditions) > 0 {
			n++
		}
	}
	return n
}

func TestControllerLeaderKilled(t *testing.T) {
	c := ipamCluster(t)
	c.pool(t, "default", 5, dual("10.30.0.0/18", "fd00:30::/114"))
	n := c.node(t, "node")
	a, b := c.start(t, "replica-a"), c.start(t, "replica-b")
	a.requireReady(t)
	b.requireReady(t)
	leads, standby := c.leader(t, a, b)

	const total = 200
	var requests []string
	for i := range total {
		requests = append(requests, fmt.Sprintf("r-%d", i))
	}
	asked := make(chan error, 1)
	go func() {
		for _, name := range requests {
			if _, err := c.tryAsk(t.Context(), name, n, "default"); err != nil {
				asked <- err
				return
			}
		}
		asked <- nil
	}()
	testkit.Eventually(t, 20*time.Second, "the middle of the work", func() error {
		if got := c.answered(t); got < total/4 {
			return fmt.Errorf("%d answers", got)
		}
		return nil
	})
	leads.kill()
	at := c.answered(t)
	if at == total {
		t.Fatal("all requests were answered before the leader was killed")
	}
	if err := <-asked; err != nil {
		t.Fatal(err)
	}
	c.requireOneBlockEach(t, 60*time.Second, requests...)
	t.Logf("killed after %d answers", at)

	t.Run("the new leader has the metrics", func(t *testing.T) {
		testkit.Eventually(t, 10*time.Second, "metrics", func() error {
			body, err := netlab.Get(t.Context(), http.DefaultClient, "http://"+standby.metrics+"/metrics")
			for _, want := range []string{
				`coil_controller_max_blocks{pool="default"} 512`, `coil_controller_allocated_blocks{pool="default"} 200`,
			} {
				if err == nil && !strings.Contains(body, want+"\n") {
					err = fmt.Errorf("there is no %q", want)
				}
			}
			return err
		})
		if _, err := netlab.Get(t.Context(), http.DefaultClient, "http://"+standby.health+"/healthz"); err != nil {
			t.Error(err)
		}
	})
	t.Run("the metrics of a pool end with it", func(t *testing.T) {
		bs := c.blocksOf(t, "default")
		for i := range bs {
			if err := c.drop(t.Context(), &bs[i]); err != nil {
				t.Fatal(err)
			}
		}
		if err := c.coil.CoilV2().AddressPools().Delete(t.Context(), "default", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		testkit.Eventually(t, 10*time.Second, "end of the metrics", func() error {
			body, err := netlab.Get(t.Context(), http.DefaultClient, "http://"+standby.metrics+"/metrics")
			if err == nil && strings.Contains(body, `pool="default"`) {
				err = errors.New("they are there")
			}
			return err
		})
	})
}

// When the API server is away for longer than the lease, the processes end or wait, and
// the next ones go on. Nothing is lost.
func TestControllerAPIServerAway(t *testing.T) {
	c := ipamCluster(t)
	c.pool(t, "default", 0, v4("10.31.0.0/24"))
	n := c.node(t, "node")
	r := c.start(t, "replica-a")
	r.requireReady(t)
	c.ask(t, "before", n, "default")
	c.answer(t, "before")
	c.api.StopServer()
	select {
	case err := <-r.ended:
		if exit := (*exec.ExitError)(nil); !errors.As(err, &exit) || exit.ExitCode() != 1 {
			t.Errorf("the leader ended with %v, want exit status 1 for the lost lease", err)
		}
	case <-time.After(testkit.Timeout(30 * time.Second)):
		t.Error("the leader goes on without a lease")
	}
	if err := c.api.StartServer(t.Context()); err != nil {
		t.Fatal(err)
	}
	next := c.start(t, "replica-b")
	next.requireReady(t)
	c.ask(t, "after", n, "default")
	c.requireOneBlockEach(t, 30*time.Second, "before", "after")
}

func TestControllerFlags(t *testing.T) {
	testkit.Need(t, testkit.APIServer)
	bin := testkit.Must((&build.Builder{Log: os.Stderr}).Own(t.Context(), "cmd/coil-ipam-controller"))(t)
	for _, tt := range []struct{ name, flag, words string }{
		{"no interval", "--gc-interval=0s", "--gc-interval is 0s"},
		{"a quarantine that ends before it begins", "--quarantine=-1s", "--quarantine is -1s"},
		{"times of the lease", "--leader-election-renew-deadline=1m", "must each be longer"},
		{"no API server", "--kubeconfig=/nonexistent", "give --kubeconfig"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			out, err := exec.CommandContext(t.Context(), bin, tt.flag).CombinedOutput()
			if err == nil || !strings.Contains(string(out), tt.words) {
				t.Errorf("%s: error %v, output %s; want %q", tt.flag, err, out, tt.words)
			}
		})
	}
}
