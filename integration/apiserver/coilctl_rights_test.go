package apiserver

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/integration/guide"
	"github.com/coil-net/coil/pkg/app/coilctl"
	"github.com/coil-net/coil/pkg/plan/preflight"
	"github.com/coil-net/coil/pkg/testkit"
)

// watchBy runs a command with --watch. It returns the lines that it prints, and what interrupts it and waits for its end.
func watchBy(t *testing.T, kubeconfig string, args ...string) (lines <-chan string, interrupt func()) {
	t.Helper()
	caught := make(chan os.Signal, 1)
	signal.Notify(caught, os.Interrupt) // the command has ended itself, perhaps, and the process must not
	t.Cleanup(func() { signal.Stop(caught) })
	r, w := io.Pipe()
	printed, ended := make(chan string, 100), make(chan int, 1)
	var errOut bytes.Buffer
	go func() {
		code := coilctl.Main(append([]string{"coilctl", "--watch", "--kubeconfig=" + kubeconfig}, args...), strings.NewReader(""), w, &errOut)
		w.Close()
		ended <- code
	}()
	go func() {
		for s := bufio.NewScanner(r); s.Scan(); {
			printed <- s.Text()
		}
		close(printed)
	}()
	return printed, func() {
		t.Helper()
		testkit.Check(t, syscall.Kill(os.Getpid(), syscall.SIGINT))
		select {
		case code := <-ended:
			if code != 0 || errOut.Len() > 0 {
				t.Errorf("coilctl %q: exit code %d, %s", args, code, errOut.String())
			}
		case <-time.After(testkit.Timeout(20 * time.Second)):
			t.Fatalf("coilctl %q goes on", args)
		}
	}
}

// wantsLine waits for a line that begins with a text and contains another.
func wantsLine(t *testing.T, lines <-chan string, begin, contains string) {
	t.Helper()
	select {
	case line, ok := <-lines:
		if !ok || !strings.HasPrefix(line, begin) || !strings.Contains(line, contains) {
			t.Fatalf("a line is %q, want %s...%s", line, begin, contains)
		}
	case <-time.After(testkit.Timeout(20 * time.Second)):
		t.Fatalf("there is no line %s", begin)
	}
}

// Whoever has the rights that a command's help names can use it, also with --watch.
func TestCoilctlRights(t *testing.T) {
	c := ipamCluster(t)
	for _, command := range []string{"status", "pools", "nodes", "blocks", "addresses", "egresses", "services"} {
		t.Run(command, func(t *testing.T) {
			user := fresh("operator")
			kubeconfig := writeKubeconfig(t, testkit.Must(c.api.UserConfig(user))(t))
			run := func(args ...string) (code int, out, errOut string) {
				var o, e bytes.Buffer
				code = coilctl.Main(append([]string{"coilctl", "--kubeconfig=" + kubeconfig}, args...), strings.NewReader(""), &o, &e)
				return code, o.String(), e.String()
			}
			_, help, _ := run(command, "--help")
			if command == "status" && !strings.Contains(help, "; get leases of coordination.k8s.io in the namespace "+preflight.Namespace+".") {
				t.Errorf("the help doesn't name the right to get Leases:\n%s", help)
			}
			if code, _, errOut := run(command); code != 1 || strings.Count(errOut, "is forbidden") == 0 {
				t.Errorf("without rights: exit code %d, %s", code, errOut)
			}
			role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: user}, Rules: guide.Rights(t, help)}
			testkit.Must(c.core.RbacV1().ClusterRoles().Create(t.Context(), role, metav1.CreateOptions{}))(t)
			testkit.Must(c.core.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
				ObjectMeta: metav1.ObjectMeta{Name: user}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: user},
				Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}},
			}, metav1.CreateOptions{}))(t)
			testkit.Eventually(t, 20*time.Second, "the API server knows the rights", func() error {
				code, _, errOut := run(command, "-o", "json")
				if code != 0 {
					return fmt.Errorf("exit code %d: %s", code, errOut)
				}
				return nil
			})
			if command == "status" {
				return
			}
			lines, interrupt := watchBy(t, kubeconfig, command)
			wantsLine(t, lines, "EVENT ", "")
			interrupt()
		})
	}
}
