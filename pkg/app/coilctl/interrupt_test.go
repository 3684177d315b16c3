package coilctl

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/pkg/plan/selftest"
	"github.com/coil-net/coil/pkg/testkit"
)

// asProgram is the environment variable with which the tests' binary is coilctl.
const asProgram = "COILCTL_TEST_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		os.Exit(Main(os.Args, os.Stdin, os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

// tested is an API server of a cluster with a node on which pods never start. The pod of a selftest goes when it is deleted, unless it is held.
type tested struct {
	mu    sync.Mutex
	held  bool
	there bool
	asked []string
	// written is what the program has written to the standard error.
	written testkit.Buffer
}

// ServeHTTP implements http.Handler.
func (a *tested) ServeHTTP(out http.ResponseWriter, in *http.Request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	own := strings.Contains(in.URL.Path, "/"+selftest.Prefix)
	a.asked = append(a.asked, in.Method+" "+in.URL.Path)
	var object any = metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusSuccess}
	pod := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "node-0", UID: "u"}, Spec: corev1.PodSpec{NodeName: "n1"}, Status: corev1.PodStatus{Phase: corev1.PodPending, StartTime: &metav1.Time{Time: time.Now()}}}
	pod.Status.ContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ErrImagePull"}}}}
	switch what := in.URL.Path[strings.LastIndex(in.URL.Path, "/")+1:]; {
	case in.Method == http.MethodPost && what == "pods":
		a.there, object = true, pod
	case in.Method == http.MethodDelete && what == "node-0":
		a.there = a.held
	case in.Method != http.MethodGet:
	case what == "pods" && own:
		l := corev1.PodList{TypeMeta: metav1.TypeMeta{Kind: "PodList", APIVersion: "v1"}}
		if a.there {
			l.Items = append(l.Items, pod)
		}
		object = l
	case what == "pods": // of coild
		pod.Namespace, pod.Spec.ImagePullSecrets = "kube-system", []corev1.LocalObjectReference{{Name: "registry"}}
		object = corev1.PodList{TypeMeta: metav1.TypeMeta{Kind: "PodList", APIVersion: "v1"}, Items: []corev1.Pod{pod}}
	case what == "namespaces":
		object = corev1.NamespaceList{TypeMeta: metav1.TypeMeta{Kind: "NamespaceList", APIVersion: "v1"}}
	case what == "nodes":
		n := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}, Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}}}
		object = corev1.NodeList{TypeMeta: metav1.TypeMeta{Kind: "NodeList", APIVersion: "v1"}, Items: []corev1.Node{n}}
	case what == "daemonsets":
		d := appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Name: "coild"}}
		d.Spec.Template.Spec.Containers = []corev1.Container{{Name: "coild", Image: "coil", Args: []string{"--enable-ipam=false"}}}
		object = appsv1.DaemonSetList{TypeMeta: metav1.TypeMeta{Kind: "DaemonSetList", APIVersion: "apps/v1"}, Items: []appsv1.DaemonSet{d}}
	default:
		out.Header().Set("Content-Type", "application/json")
		out.WriteHeader(http.StatusNotFound)
		object = metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure, Reason: metav1.StatusReasonNotFound, Code: http.StatusNotFound}
	}
	out.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(out).Encode(object)
}

// deletes says whether it was asked to delete the pod or a namespace.
func (a *tested) deletes(name string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.ContainsFunc(a.asked, func(r string) bool { return strings.HasPrefix(r, http.MethodDelete) && strings.HasSuffix(r, "/"+name) })
}

// process is a process of coilctl selftest whose pod has been made.
type process struct {
	*tested
	t    *testing.T
	cmd  *exec.Cmd
	out  *os.File
	left string // its namespace
}

// start starts the program by a command, such as nohup.
func start(t *testing.T, held bool, command ...string) *process {
	t.Helper()
	r := &process{t: t, tested: &tested{held: held}}
	api := httptest.NewServer(r)
	t.Cleanup(api.Close)
	if command == nil { // these tests may run under nohup themselves
		command = []string{"env", "--default-signal=HUP"}
	}
	command = append(command, testkit.Must(os.Executable())(t), "selftest", "--server="+api.URL)
	r.cmd = exec.CommandContext(t.Context(), command[0], append(command[1:], "--timeout=1s")...)
	r.cmd.Env = append(os.Environ(), asProgram+"=1", "KUBECONFIG="+t.TempDir()+"/none")
	r.cmd.Stderr = &r.written
	read, write, err := os.Pipe()
	testkit.Check(t, err)
	t.Cleanup(func() { read.Close() })
	r.out, r.cmd.Stdout = read, write
	testkit.Check(t, r.cmd.Start(), write.Close())
	r.until("its pod is made", r.made)
	return r
}

// made says whether the pod is there, and finds its namespace.
func (r *process) made() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, asked := range r.asked {
		if path, ok := strings.CutPrefix(asked, "POST /api/v1/namespaces/"); ok && strings.HasSuffix(path, "/pods") {
			r.left = strings.TrimSuffix(path, "/pods")
		}
	}
	return r.there
}

func (r *process) until(what string, so func() bool) {
	r.t.Helper()
	testkit.Eventually(r.t, 20*time.Second, what, func() error {
		if so() {
			return nil
		}
		return fmt.Errorf("it says %q", r.written.String())
	})
}

func (r *process) signal(s syscall.Signal) {
	r.t.Helper()
	testkit.Check(r.t, r.cmd.Process.Signal(s))
}

// tells waits until it has said what is left to do.
func (r *process) tells() {
	r.t.Helper()
	r.until("it says what is left", func() bool {
		return strings.HasPrefix(r.written.String(), "Interrupted: the pods of Namespace "+r.left+" are being removed, ") && strings.Contains(r.written.String(), "kubectl delete namespace "+r.left+" removes the rest\n")
	})
}

// removes waits for the end of the process. The pod and the namespace have to be gone, and an error to be told.
func (r *process) removes(says string) {
	r.t.Helper()
	var failed *exec.ExitError
	if err := r.cmd.Wait(); !errors.As(err, &failed) || failed.ExitCode() != 1 || !strings.HasSuffix(r.written.String(), says) {
		r.t.Errorf("it has ended with %v, and said %q", err, r.written.String())
	}
	if r.made() || !r.deletes(r.left) {
		r.t.Errorf("it leaves Namespace %s: the pod is there: %t", r.left, r.made())
	}
}

// A selftest whose image can't be pulled names the Secret of coild's pods, and reads none.
func TestSelftestUnpulled(t *testing.T) {
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	a := &tested{}
	api := httptest.NewServer(a)
	defer api.Close()
	code, out, errOut := run("", "selftest", "--timeout=1s", "--server="+api.URL)
	if code != 1 || !strings.Contains(out, "it is Pending: ErrImagePull\n                   -> the pods of coild have credentials for registries: use --image-pull-secret=kube-system/registry\n") {
		t.Errorf("exit code %d, %s%s", code, out, errOut)
	}
	if slices.ContainsFunc(a.asked, func(r string) bool { return strings.Contains(r, "/secrets") }) {
		t.Errorf("it asks for %q", a.asked)
	}
}

// However a selftest is ended, it removes its pods and its namespace. A second interrupt ends the process at once, which has said before what is left to do.
func TestSelftestInterrupts(t *testing.T) {
	for _, s := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP} {
		t.Run(s.String(), func(t *testing.T) {
			t.Parallel()
			r := start(t, false)
			r.signal(s)
			r.removes("removes the rest\nerror: interrupted\n")
		})
	}
	t.Run("a terminal that is closed sends several", func(t *testing.T) {
		t.Parallel()
		r := start(t, true)
		r.signal(syscall.SIGHUP)
		r.tells()
		r.signal(syscall.SIGHUP)
		r.until("it removes its pod", func() bool { return r.deletes("node-0") })
		r.signal(syscall.SIGHUP)
		r.mu.Lock()
		r.there = false
		r.mu.Unlock()
		r.removes("error: interrupted\n")
	})
	t.Run("the reader of its lines is gone", func(t *testing.T) {
		t.Parallel()
		r := start(t, false)
		testkit.Check(t, r.out.Close())
		r.removes("error: write /dev/stdout: broken pipe\n")
	})
	t.Run("nohup", func(t *testing.T) {
		t.Parallel()
		r := start(t, false, "nohup")
		r.signal(syscall.SIGHUP)
		text := string(testkit.Must(io.ReadAll(r.out))(t))
		if !strings.HasSuffix(text, "0 checks have succeeded, 2 failed, 1 skipped\n") {
			t.Errorf("it prints %s", text)
		}
		r.removes("error: the selftest has failed\n")
	})
	for _, s := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		for _, late := range []bool{false, true} {
			t.Run(fmt.Sprintf("twice %s, late: %t", s, late), func(t *testing.T) {
				t.Parallel()
				r := start(t, true)
				if late { // all checks are done
					r.until("it removes its pod", func() bool { return r.deletes("node-0") })
				}
				r.signal(s)
				r.tells()
				r.signal(s)
				var failed *exec.ExitError
				if err := r.cmd.Wait(); !errors.As(err, &failed) || failed.Sys().(syscall.WaitStatus).Signal() != s {
					t.Errorf("it has ended with %v", err)
				}
				if !r.made() || r.deletes(r.left) {
					t.Error("it has removed all")
				}
			})
		}
	}
}
