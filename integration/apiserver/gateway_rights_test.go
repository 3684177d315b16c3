package apiserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/coil-net/coil/generated/clientset/versioned"
	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/integration/lab/controlplane"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

const (
	gatewayUsers = "coil.cybozu.com:lb-gateways"
	gatewayUser  = "coil.cybozu.com:lb-gateway:"
)

// gatewaysServer is an API server with the gateways gw1 and gw2, and the rights in manifests/services.
func gatewaysServer(t *testing.T) *controlplane.API {
	t.Helper()
	api := own(t, controlplane.Options{})
	err := installCRDs(t.Context(), api.RESTConfig(), readCRDs)
	for _, file := range []string{"gateway-rbac.yaml", "gateway-own.yaml", "rbac.yaml"} {
		err = errors.Join(err, installRBAC(t.Context(), api.RESTConfig(), "../services/"+file))
	}
	testkit.Check(t, err)
	admin := testkit.Must(versioned.NewForConfig(api.RESTConfig()))(t).CoilV2()
	for _, name := range []string{"gw1", "gw2"} {
		o := &v2.LoadBalancerGateway{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v2.LoadBalancerGatewaySpec{Pools: []string{"dmz"}}}
		testkit.Must(admin.LoadBalancerGateways().Create(t.Context(), o, metav1.CreateOptions{}))(t)
	}
	return api
}

// tell writes the status of a gateway as a client. The admin reads it before.
func tell(ctx context.Context, api *controlplane.API, c versioned.Interface, name string) error {
	admin, err := versioned.NewForConfig(api.RESTConfig())
	if err != nil {
		return err
	}
	g, err := admin.CoilV2().LoadBalancerGateways().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	g.Status.LastContact = new(metav1.Now())
	_, err = c.CoilV2().LoadBalancerGateways().UpdateStatus(ctx, g, metav1.UpdateOptions{})
	return err
}

// onlyOwn waits until a client tells the status of gw1, and not that of gw2: the API server follows policies, as rights, a moment after they were made.
func onlyOwn(t *testing.T, api *controlplane.API, c versioned.Interface) {
	t.Helper()
	testkit.Eventually(t, 30*time.Second, "gw1 tells its own status only", func() error {
		if err := tell(t.Context(), api, c, "gw2"); !apierrors.IsForbidden(err) {
			return fmt.Errorf("gw1 tells the status of gw2: %w", errors.Join(err, errors.New("not forbidden")))
		}
		return tell(t.Context(), api, c, "gw1")
	})
}

// A gateway tells its own status, whether its user or the node of its pod has its name. Others are refused, and told why.
func TestGatewayTellsItsOwnStatus(t *testing.T) {
	testkit.Need(t, testkit.APIServer)
	api := gatewaysServer(t)
	user := func(name string, groups ...string) versioned.Interface {
		return testkit.Must(versioned.NewForConfig(testkit.Must(api.UserConfig(name, groups...))(t)))(t)
	}
	machine := user(gatewayUser+"gw1", gatewayUsers)
	onlyOwn(t, api, machine)
	const (
		ownOnly   = "this coil-lb-agent is gateway gw1 and writes the status of that LoadBalancerGateway only"
		noGateway = "is no gateway: the user of a machine is coil.cybozu.com:lb-gateway:NAME"
		noRight   = `cannot update resource "loadbalancergateways/status"`
	)
	for _, c := range []struct {
		who     string
		client  versioned.Interface
		gateway string
		refused string // part of the message; empty: it is accepted
	}{
		{"a machine", machine, "gw1", ""},
		{"a machine", machine, "gw2", ownOnly},
		{"a pod on node gw1", account(t, api, "coil-lb-agent", "gw1"), "gw1", ""},
		{"a pod on node gw1", account(t, api, "coil-lb-agent", "gw1"), "gw2", ownOnly},
		{"a token that names no node", account(t, api, "coil-lb-agent", ""), "gw1", noGateway},
		{"a user without prefix", user("gw1", gatewayUsers), "gw1", noGateway},
		{"a user without name", user(gatewayUser, gatewayUsers), "gw1", noGateway},
		{"a user of no group", user(gatewayUser + "gw1"), "gw1", noRight},
		{"another program on node gw1", account(t, api, "coil-lb-controller", "gw1"), "gw1", noRight},
		{"an admin", testkit.Must(versioned.NewForConfig(api.RESTConfig()))(t), "gw2", ""},
	} {
		switch err := tell(t.Context(), api, c.client, c.gateway); {
		case c.refused == "" && err != nil:
			t.Errorf("%s tells the status of %s: %v", c.who, c.gateway, err)
		case c.refused != "" && (!apierrors.IsForbidden(err) || !strings.Contains(err.Error(), c.refused)):
			t.Errorf("%s tells the status of %s: %v, want that it is forbidden: %s", c.who, c.gateway, err, c.refused)
		}
	}
}

// commands are those of a part of a page, without prompts.
func commands(t *testing.T, page, heading string) string {
	t.Helper()
	root := testkit.Must(build.Root())(t)
	_, part, found := strings.Cut(string(testkit.Must(os.ReadFile(filepath.Join(root, page)))(t)), "\n"+heading+"\n")
	if !found {
		t.Fatalf("%s has no heading %q", page, heading)
	}
	part, _, _ = strings.Cut(part, "\n## ")
	var all []string
	for _, m := range block.FindAllStringSubmatch(part, -1) {
		if m[2] == "console" {
			all = append(all, regexp.MustCompile(`(?m)^[$#] `).ReplaceAllString(m[3], ""))
		}
	}
	if len(all) == 0 {
		t.Fatalf("%s shows no command below %q", page, heading)
	}
	return strings.Join(all, "")
}

// The page's commands make a kubeconfig by which a gateway has its rights, and no more.
func TestGatewayKubeconfig(t *testing.T) {
	testkit.Need(t, testkit.APIServer)
	api := gatewaysServer(t)
	testkit.Check(t, api.StartControllerManager(t.Context(), "--controllers=certificatesigningrequest-signing-controller",
		"--cluster-signing-cert-file="+filepath.Join(api.Dir(), "ca.crt"), "--cluster-signing-key-file="+filepath.Join(api.Dir(), "ca.key")))
	dir := t.TempDir()
	programs := testkit.Must((&build.Builder{Log: os.Stderr}).Programs(t.Context(), controlplane.Kubectl))(t)
	testkit.Check(t, os.Symlink(programs[controlplane.Kubectl], filepath.Join(dir, "kubectl")))
	cmd := exec.CommandContext(t.Context(), "bash", "-euo", "pipefail", "-c", commands(t, "cmd/coil-lb-agent/README.md", "### Its kubeconfig"))
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), "KUBECONFIG="+api.Kubeconfig(), "KUBECACHEDIR="+filepath.Join(dir, "cache"))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("the page's commands: %v\n%s", err, out)
	}
	cfg := testkit.Must(clientcmd.BuildConfigFromFlags("", filepath.Join(dir, "lb-agent.kubeconfig")))(t)
	onlyOwn(t, api, testkit.Must(versioned.NewForConfig(cfg))(t))
	core := testkit.Must(kubernetes.NewForConfig(cfg))(t)
	if _, err := core.CoreV1().Services(corev1.NamespaceAll).List(t.Context(), metav1.ListOptions{}); err != nil {
		t.Errorf("Services: %v", err)
	}
	if _, err := core.CoreV1().Secrets(corev1.NamespaceAll).List(t.Context(), metav1.ListOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("Secrets: %v, want forbidden", err)
	}
	if cfg.CertFile != filepath.Join(dir, "lb-agent.crt") || cfg.KeyFile != filepath.Join(dir, "lb-agent.key") || cfg.CertData != nil || cfg.CAData == nil {
		t.Errorf("certificate %q, key %q; want files, which can be replaced, and the authority in the kubeconfig", cfg.CertFile, cfg.KeyFile)
	}
}
