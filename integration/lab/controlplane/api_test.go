package controlplane

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/coil-net/coil/pkg/testkit"
)

func TestAPI(t *testing.T) {
	testkit.Need(t, testkit.APIServer)
	audit := filepath.Join(t.TempDir(), "audit.log")
	policy := filepath.Join(t.TempDir(), "policy.yaml")
	err := os.WriteFile(policy, []byte("apiVersion: audit.k8s.io/v1\nkind: Policy\nrules: [{level: Metadata}]\n"), 0o600)
	if err != nil {
		t.Fatal(err)
	}
	api, err := StartAPI(t.Context(), Options{
		Log:           t.Output(),
		APIServerArgs: []string{"--audit-policy-file=" + policy, "--audit-log-path=" + audit},
	})
	if err != nil {
		t.Fatal(err)
	}
	dir, pids := api.Dir(), []int{api.etcd.PID(), api.server.PID()}
	t.Cleanup(func() {
		if err := api.Stop(); err != nil {
			t.Errorf("stop: %v", err)
		}
		if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left behind: %v", dir, err)
		}
		for _, pid := range pids {
			if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
				t.Errorf("process %d is left behind: %v", pid, err)
			}
		}
	})
	client := kubernetes.NewForConfigOrDie(api.RESTConfig())

	t.Run("a pod can be made by hand", func(t *testing.T) {
		_, err := client.CoreV1().Pods("default").Create(t.Context(), &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "p"},
			Spec:       corev1.PodSpec{NodeName: "n", Containers: []corev1.Container{{Name: "c", Image: "i"}}},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
	})
	t.Run("a user has only his own rights", func(t *testing.T) {
		cfg, err := api.UserConfig("alice", "some-group")
		if err != nil {
			t.Fatal(err)
		}
		_, err = kubernetes.NewForConfigOrDie(cfg).CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
		if !apierrors.IsForbidden(err) {
			t.Errorf("listing nodes as alice: %v, want forbidden", err)
		}
	})
	t.Run("extra flags arrive", func(t *testing.T) {
		b, err := os.ReadFile(audit)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(b), `"resource":"pods"`) {
			t.Error("the audit log doesn't have the pod")
		}
	})
	t.Run("data survives an outage", func(t *testing.T) {
		api.StopServer()
		if _, err := client.CoreV1().Pods("default").Get(t.Context(), "p", metav1.GetOptions{}); err == nil {
			t.Fatal("a stopped API server answered")
		}
		if err := api.StartServer(t.Context()); err != nil {
			t.Fatal(err)
		}
		pids = append(pids, api.server.PID())
		if _, err := client.CoreV1().Pods("default").Get(t.Context(), "p", metav1.GetOptions{}); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("another one begins with its data", func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "data")
		testkit.Check(t, api.SaveData(t.Context(), file))
		other := testkit.Must(StartAPI(t.Context(), Options{Log: t.Output(), Data: file}))(t)
		defer other.Stop()
		pods := kubernetes.NewForConfigOrDie(other.RESTConfig()).CoreV1().Pods("default")
		testkit.Must(pods.Get(t.Context(), "p", metav1.GetOptions{}))(t)
		testkit.Check(t, pods.Delete(t.Context(), "p", metav1.DeleteOptions{}))
		if _, err := client.CoreV1().Pods("default").Get(t.Context(), "p", metav1.GetOptions{}); err != nil {
			t.Errorf("the first one's pod is gone with the other's: %v", err)
		}
	})
	t.Run("a second instance is another cluster", func(t *testing.T) {
		other, err := StartAPI(t.Context(), Options{Log: t.Output()})
		if err != nil {
			t.Fatal(err)
		}
		defer other.Stop()
		_, err = kubernetes.NewForConfigOrDie(other.RESTConfig()).CoreV1().Pods("default").Get(t.Context(), "p", metav1.GetOptions{})
		if !apierrors.IsNotFound(err) {
			t.Errorf("get the first instance's pod from the second: %v, want not found", err)
		}
	})
}

func TestAPIReportsWhyItDoesNotStart(t *testing.T) {
	testkit.Need(t, testkit.APIServer)
	dir := t.TempDir()
	_, err := StartAPI(t.Context(), Options{Dir: dir, Log: t.Output(), APIServerArgs: []string{"--no-such-flag"}})
	if err == nil || !strings.Contains(err.Error(), "no-such-flag") {
		t.Fatalf("error is %v, want the API server's own words", err)
	}
	// Nothing of a failed start may still run: the directory is in every command line.
	if pids := commandLines(t, dir); len(pids) > 0 {
		t.Errorf("processes %v are left behind", pids)
	}
}

// commandLines returns the processes whose command line contains s.
func commandLines(t *testing.T, s string) []int {
	t.Helper()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		// A process may end while this looks at it.
		if b, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline")); err == nil && strings.Contains(string(b), s) {
			pids = append(pids, pid)
		}
	}
	return pids
}
