package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/integration/lab/image"
	"github.com/coil-net/coil/integration/lab/machine"
	"github.com/coil-net/coil/pkg/testkit"
)

func TestLifecycle(t *testing.T) {
	testkit.Need(t, testkit.Cluster)
	const name = "lab-life"
	mustDown(t, name)
	t.Cleanup(func() { mustDown(t, name) })
	settings := readSettings(t)

	c, err := Up(t.Context(), Options{Name: name, Nodes: 2, ReferenceCNI: true, Log: t.Output()})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	if d := readSettings(t); d != settings {
		t.Errorf("the real machine's settings changed from %s to %s", settings, d)
	}
	client := kubernetes.NewForConfigOrDie(c.RESTConfig())
	var pods []*corev1.Pod
	for _, node := range c.Nodes() {
		pods = append(pods, mustRun(t, client, node))
	}

	t.Run("pods of two nodes reach each other in both families", func(t *testing.T) {
		for _, ip := range pods[1].Status.PodIPs {
			out, err := c.Kubectl(t.Context(), "exec", pods[0].Name, "--", "timeout", "5", "wget", "-q", "-O-", "http://"+hostPort(ip.IP))
			if err != nil || string(out) != "ok\n" {
				t.Errorf("get %s: %q, %v", ip.IP, out, err)
			}
		}
	})
	t.Run("a node has its own file system", func(t *testing.T) {
		worker := c.Nodes()[1]
		files := []string{"/var/lib/coil/mark", "/run/mark", "/etc/mark", "/usr/mark"}
		for _, file := range files {
			mustExec(t, c, worker, "touch", file)
			if _, err := os.Stat(file); err == nil {
				t.Errorf("%s of the node appeared on the real machine", file)
			}
			if _, err := c.Exec(t.Context(), c.Nodes()[0], "ls", file); err == nil {
				t.Errorf("%s of one node appeared on the other", file)
			}
		}
		if got := mustExec(t, c, worker, "hostname"); got != worker+"\n" {
			t.Errorf("host name is %q", got)
		}
	})
	t.Run("an error names the machine and has the command's words", func(t *testing.T) {
		_, err := c.Exec(t.Context(), c.Nodes()[0], "ls", "/no/such/file")
		if err == nil || !strings.Contains(err.Error(), c.Nodes()[0]) || !strings.Contains(err.Error(), "No such file") {
			t.Errorf("error is %v", err)
		}
		if _, err := c.Exec(t.Context(), "nobody", "true"); err == nil {
			t.Error("a node that doesn't exist was entered")
		}
	})
	t.Run("power cut", func(t *testing.T) { testPowerCut(t, c, client, pods[1]) })
	t.Run("an outage of the API server", func(t *testing.T) {
		if err := c.Stop(t.Context(), Fabric, "kube-apiserver"); err != nil {
			t.Fatal(err)
		}
		// The lab's own socket still accepts, and client-go repeats what ends without an answer.
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{}); err == nil {
			t.Error("a stopped API server answered")
		}
		if err := c.Start(t.Context(), Fabric, "kube-apiserver"); err != nil {
			t.Fatal(err)
		}
		testkit.Eventually(t, 30*time.Second, "the API server answers again", func() error {
			_, err := client.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
			return err
		})
	})
	t.Run("a killed component comes back", func(t *testing.T) {
		mustExec(t, c, c.Nodes()[0], "pkill", "-9", "-x", "kubelet")
		testkit.Eventually(t, 10*time.Second, "kubelet runs again", func() error {
			for _, m := range c.Status(t.Context()) {
				for _, s := range m.Components {
					if m.Name == c.Nodes()[0] && s.Name == "kubelet" && s.PID != 0 && s.Restarts == 1 {
						return nil
					}
				}
			}
			return errors.New("it doesn't")
		})
	})
	t.Run("a second cluster of the same name is refused", func(t *testing.T) {
		_, err := Up(t.Context(), Options{Name: name})
		if err == nil || !strings.Contains(err.Error(), "lab down --name "+name) {
			t.Errorf("error is %v, want one that tells what to do", err)
		}
	})
}

// testPowerCut switches the worker off and on; pod runs there.
func testPowerCut(t *testing.T, c *Cluster, client kubernetes.Interface, pod *corev1.Pod) {
	worker := c.Nodes()[1]
	bootID := mustExec(t, c, worker, "cat", machine.BootIDFile)
	if kernel := mustExec(t, c, worker, "cat", "/proc/sys/kernel/random/boot_id"); kernel != bootID {
		t.Errorf("boot ID is %q in %s and %q in /proc", bootID, machine.BootIDFile, kernel)
	}
	mustExec(t, c, worker, "ip", "route", "add", "blackhole", "192.0.2.0/24")
	addresses := []string{c.families()[0].node(1).Addr().String(), c.families()[1].node(1).Addr().String()}
	for _, a := range addresses {
		mustExec(t, c, c.Nodes()[0], "busybox", "ping", "-q", "-c1", "-W5", a) // the neighbour is known
	}
	before, err := c.init(worker)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.PowerOff(t.Context(), worker); err != nil {
		t.Fatal(err)
	}
	if before.Alive() {
		t.Error("the node's PID 1 survived")
	}
	if _, err := c.Exec(t.Context(), worker, "true"); err == nil {
		t.Error("a node that is off was entered")
	}
	// Another process, as the command line is one, sees the same.
	other, err := Open("", c.Name())
	if err != nil {
		t.Fatal(err)
	}
	if err := other.PowerOn(t.Context(), worker); err != nil {
		t.Fatal(err)
	}
	if err := c.load(); err != nil {
		t.Fatal(err)
	}
	if err := c.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	// A machine keeps its network card: what others know of their neighbour holds.
	for _, a := range addresses {
		mustExec(t, c, c.Nodes()[0], "busybox", "ping", "-q", "-c1", "-W5", a)
	}
	if again := mustExec(t, c, worker, "cat", machine.BootIDFile); again == bootID {
		t.Error("the boot ID is the same after a power cut")
	}
	if routes := mustExec(t, c, worker, "ip", "route"); strings.Contains(routes, "blackhole") {
		t.Errorf("a route survived the power cut:\n%s", routes)
	}
	mustExec(t, c, worker, "ls", "/var/lib/coil/mark", "/etc/mark")
	if _, err := c.Exec(t.Context(), worker, "ls", "/run/mark"); err == nil {
		t.Error("/run survived the power cut")
	}
	testkit.Eventually(t, 60*time.Second, "the pod runs again", func() error {
		p, err := client.CoreV1().Pods("default").Get(t.Context(), pod.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if s := p.Status.ContainerStatuses; p.Status.Phase != corev1.PodRunning || len(s) == 0 || !s[0].Ready || s[0].RestartCount == 0 {
			return fmt.Errorf("phase %s, containers %+v", p.Status.Phase, s)
		}
		return nil
	})
}

// TestDownAfterKill kills `lab up` at many moments and looks for what is left after `lab down`.
func TestDownAfterKill(t *testing.T) {
	testkit.Need(t, testkit.Cluster)
	const name = "lab-crash"
	lab, err := new(build.Builder).Own(t.Context(), "integration/lab")
	if err != nil {
		t.Fatal(err)
	}
	mustDown(t, name)
	up := func(ctx context.Context) *exec.Cmd {
		return exec.CommandContext(ctx, lab, "up", "--name", name, "--nodes", "2", "--no-coil", "--reference-cni")
	}
	if err := Build(t.Context(), "", t.Output()); err != nil {
		t.Fatal(err)
	}
	// One complete run tells how long it takes here.
	start := time.Now()
	if out, err := up(t.Context()).CombinedOutput(); err != nil {
		t.Fatalf("lab up: %v\n%s", err, out)
	}
	whole := time.Since(start)
	mustDown(t, name)
	// The four are while the control plane starts, while the nodes do, while they get images, and about at the end.
	moments := testkit.CrashForm.Times(4, 8)
	for i := range moments {
		after := whole * time.Duration(i+1) / time.Duration(moments)
		ctx, cancel := context.WithTimeout(t.Context(), after)
		if err := up(ctx).Run(); err == nil && i < moments/2 {
			t.Errorf("lab up was done after %s already", after)
		}
		cancel()
		mustDown(t, name)
	}
}

// mustDown removes the cluster and fails the test when anything of it is left.
func mustDown(t *testing.T, name string) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	if err := Down(ctx, "", name); err != nil {
		t.Fatalf("down: %v", err)
	}
	if err := Down(ctx, "", name); err != nil {
		t.Fatalf("down a second time: %v", err)
	}
	dir := filepath.Join(DefaultStateDir, name)
	if left, _ := filepath.Glob(dir + "*"); len(left) > 0 {
		t.Errorf("left on disk: %v", left)
	}
	for _, pattern := range []string{"/sys/fs/cgroup/*/coil-lab/" + name, "/sys/fs/cgroup/coil-lab/" + name} {
		if left, _ := filepath.Glob(pattern); len(left) > 0 {
			t.Errorf("left cgroups: %v", left)
		}
	}
	processes, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range processes {
		// Processes may end while this looks at them; each file then reads as empty.
		environ, _ := os.ReadFile(p + "/environ")
		mounts, _ := os.ReadFile(p + "/mountinfo")
		if bytes.Contains(environ, []byte(dir+"/")) || bytes.Contains(mounts, []byte(dir+"/")) {
			cmdline, _ := os.ReadFile(p + "/cmdline")
			t.Errorf("left process or mount: %s %q", p, cmdline)
		}
	}
}

func mustExec(t *testing.T, c *Cluster, node string, args ...string) string {
	t.Helper()
	out, err := c.Exec(t.Context(), node, args...)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// mustRun starts a web server on a node and waits for it.
func mustRun(t *testing.T, client kubernetes.Interface, node string) *corev1.Pod {
	t.Helper()
	zero := int64(0)
	pod, err := client.CoreV1().Pods("default").Create(t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "web-" + node},
		Spec: corev1.PodSpec{
			NodeName:                      node,
			TerminationGracePeriodSeconds: &zero,
			Containers: []corev1.Container{{
				Name: "web", Image: image.Tools, ImagePullPolicy: corev1.PullNever,
				Command: []string{"httpd", "-f", "-p", "8080", "-h", "/www"},
			}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, 60*time.Second, pod.Name+" runs", func() error {
		if pod, err = client.CoreV1().Pods("default").Get(t.Context(), pod.Name, metav1.GetOptions{}); err != nil {
			return err
		}
		if pod.Status.Phase != corev1.PodRunning {
			status, err := json.Marshal(pod.Status)
			return errors.Join(fmt.Errorf("phase %s: %s", pod.Status.Phase, status), err)
		}
		return nil
	})
	return pod
}

func hostPort(ip string) string {
	if strings.Contains(ip, ":") {
		return "[" + ip + "]:8080"
	}
	return ip + ":8080"
}

// readSettings returns the real machine's values of what kubelet would change.
func readSettings(t *testing.T) string {
	t.Helper()
	var all []string
	for _, f := range []string{"vm/overcommit_memory", "kernel/panic", "kernel/keys/root_maxkeys", "net/ipv4/ip_forward"} {
		b, err := os.ReadFile("/proc/sys/" + f)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, f+"="+strings.TrimSpace(string(b)))
	}
	return strings.Join(all, " ")
}
