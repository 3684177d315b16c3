package cluster

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/pkg/testkit"
)

// The commands of coil-lb-agent's page make the kubeconfigs of two gateways, one after the other in one shell.
func TestKubeconfigsOfGateways(t *testing.T) {
	e := use(t)
	page := testkit.Must(os.ReadFile(filepath.Join(testkit.Must(build.Root())(t), "cmd", "coil-lb-agent", "README.md")))(t)
	_, commands, found := strings.Cut(string(page), "```console\n$ umask 077\n")
	commands, _, ended := strings.Cut(commands, "```")
	if !found || !ended {
		t.Fatal("the page has no commands that begin with umask")
	}
	commands = strings.TrimPrefix(strings.ReplaceAll("\n"+commands, "\n$ ", "\n"), "\n")
	dir, gateways := t.TempDir(), []string{"gw1", "gw2"}
	script := "set -e\numask 077\n"
	for _, name := range gateways {
		script += fmt.Sprintf("mkdir %[1]s; cd %[1]s\n%[2]s\ncd ..\n", name, strings.ReplaceAll(commands, "gw1", name))
	}
	kubectl := testkit.Must(e.KubectlCommand(t.Context()))(t)
	testkit.Check(t, os.Symlink(kubectl.Path, filepath.Join(dir, "kubectl")))
	shell := exec.CommandContext(t.Context(), "bash", "-c", script)
	shell.Dir, shell.Env = dir, append(kubectl.Env, "PATH="+dir+":"+os.Getenv("PATH"))
	if out, err := shell.CombinedOutput(); err != nil {
		t.Fatalf("the commands of the page: %v\n%s", err, out)
	}
	for _, name := range gateways {
		kubeconfig := filepath.Join(dir, name, "lb-agent.kubeconfig")
		out, err := e.Kubectl(t.Context(), "--kubeconfig="+kubeconfig, "auth", "whoami", "-o", "jsonpath={.status.userInfo.username} {.status.userInfo.groups[0]}")
		if want := "coil.cybozu.com:lb-gateway:" + name + " coil.cybozu.com:lb-gateways"; err != nil || string(out) != want {
			t.Errorf("the user of %s is %q, want %q: %v", name, out, want, err)
		}
	}
}
