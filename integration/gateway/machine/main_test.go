// Package machine proves that a gateway machine with a real systemd does what its pages promise: it is installed by the commands
// of a page, with the unit as it is released and keepalived under Debian's own unit.
//
// The machine is a virtual one, whose PID 1 is systemd; the API server is on the host. What it does is observed from the inside. The
// tests must not know how the programs do it.
package machine

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/coil-net/coil/integration/guide"
	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/integration/lab/vm"
	"github.com/coil-net/coil/integration/lab/vm/vmtest"
	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/integration/rig/rigtest"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

const (
	name      = "gw1" // as the page has it
	pool      = "dmz"
	namespace = "shop"

	// filesEnv is the folder with what an admin brings to the machine; only tests in the machine have it.
	filesEnv = "COIL_TEST_GATEWAY_FILES"
	// addressesEnv are the addresses of Services before the power was cut.
	addressesEnv = "COIL_TEST_GATEWAY_ADDRESSES"

	// Files of the folder beside the agent, its unit and its kubeconfig.
	installFile    = "install.sh"
	keepalivedFile = "keepalived.sh"
	adminFile      = "admin.kubeconfig"
)

// The short form reads the page. The long one does what it says, in a machine that is then cut off from its power.
func TestServiceByMachine(t *testing.T) {
	if os.Getenv(filesEnv) != "" {
		bootsTwice(t, "", nil)
		return
	}
	page := readPage(t)
	t.Run("page", page.check)
	if testkit.LBForm.Long() {
		testkit.Need(t, testkit.VM)
		onHost(t, page)
	}
}

// page is what the page has an admin do.
type page struct{ install, keepalived string }

// readPage takes the commands from the page.
func readPage(t *testing.T) page {
	t.Helper()
	_, steps := guide.Read(t, "cmd/coil-lb-agent/README.md", "\n## Installing it\n", "\n### ")
	var scripts []string
	for _, s := range steps {
		var script strings.Builder
		for line := range strings.Lines(s.Commands) {
			command, ok := strings.CutPrefix(line, "# ")
			if !ok {
				t.Fatalf("a line of the page isn't a command of root: %q", line)
			}
			script.WriteString(command)
		}
		scripts = append(scripts, script.String())
	}
	if len(scripts) != 2 {
		t.Fatalf("the page has %d blocks of commands, want those of the agent and those of keepalived: %q", len(scripts), scripts)
	}
	return page{scripts[0], scripts[1]}
}

// check wants that the commands fit the unit, which is all that can be told without a machine.
func (p page) check(t *testing.T) {
	root := testkit.Must(build.Root())(t)
	unit := string(testkit.Must(os.ReadFile(filepath.Join(root, "manifests/systemd/coil-lb-agent.service")))(t))
	for _, want := range []string{"/usr/local/bin/coil-lb-agent\n", "coil-lb-agent.service /etc/systemd/system/\n", "COIL_LB_AGENT_ARGS=--name=" + name + " >/etc/default/coil-lb-agent\n"} {
		if !strings.Contains(p.install, want) {
			t.Errorf("the page doesn't have %q:\n%s", want, p.install)
		}
	}
	for _, want := range []string{"ExecStart=/usr/local/bin/coil-lb-agent $COIL_LB_AGENT_ARGS\n", "EnvironmentFile=-/etc/default/coil-lb-agent\n"} {
		if !strings.Contains(unit, want) {
			t.Errorf("the unit doesn't have %q", want)
		}
	}
	folder := regexp.MustCompile(`(?m)^ConfigurationDirectory=(\S+)$`).FindStringSubmatch(unit)
	if folder == nil || !strings.Contains(p.keepalived, "include /etc/"+folder[1]+"/*.conf") {
		t.Errorf("keepalived doesn't include the folder %q of the unit:\n%s", folder, p.keepalived)
	}
}

// onHost runs the cluster's side of the machine.
func onHost(t *testing.T, p page) {
	ctx := t.Context()
	r := rigtest.New(t)
	testkit.Check(t, r.AddNamespace(ctx, namespace, ""))
	testkit.Must(r.Coil.CoilV2().AddressPools().Create(ctx, &v2.AddressPool{ObjectMeta: metav1.ObjectMeta{Name: pool}, Spec: v2.AddressPoolSpec{
		Purpose: v2.PurposeFloating, Announce: v2.AnnounceGateway, VRRP: &v2.PoolVRRP{RouterID: 10, Instances: 2}, Subnets: []v2.SubnetSet{rig.Dual("10.0.2.32/28", "fd00:2::100/124")},
	}}, metav1.CreateOptions{}))(t)
	testkit.Must(r.Coil.CoilV2().LoadBalancerGateways().Create(ctx, &v2.LoadBalancerGateway{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v2.LoadBalancerGatewaySpec{
		Pools: []string{pool}, Endpoints: v2.EndpointsPod, VRRP: &v2.GatewayVRRP{Interface: vm.Link, Sources: []string{vm.LinkAddr.Addr().String(), linkAddr6}},
	}}, metav1.CreateOptions{}))(t)
	root := testkit.Must(build.Root())(t)
	for _, file := range []string{"gateway-rbac.yaml", "gateway-own.yaml"} {
		testkit.Must(r.API.Kubectl(ctx, "apply", "-f", filepath.Join(root, "manifests/services", file)))(t)
	}
	controller := testkit.Must(r.NewLBController(ctx, pool))(t)
	testkit.Check(t, controller.Start())
	t.Cleanup(controller.Kill)

	dir := t.TempDir()
	agent := testkit.Must((&build.Builder{Log: os.Stderr}).Own(ctx, "cmd/coil-lb-agent"))(t)
	copyFile(t, agent, filepath.Join(dir, "coil-lb-agent-linux-amd64"))
	copyFile(t, filepath.Join(root, "manifests/systemd/coil-lb-agent.service"), filepath.Join(dir, "coil-lb-agent.service"))
	user := testkit.Must(r.API.UserConfig("coil.cybozu.com:lb-gateway:"+name, "coil.cybozu.com:lb-gateways"))(t)
	writeKubeconfig(t, user, filepath.Join(dir, "lb-agent.kubeconfig"))
	writeKubeconfig(t, r.API.RESTConfig(), filepath.Join(dir, adminFile))
	for file, script := range map[string]string{installFile: p.install, keepalivedFile: p.keepalived} {
		testkit.Check(t, os.WriteFile(filepath.Join(dir, file), []byte(script), 0o644))
	}
	bootsTwice(t, dir, func() string {
		list := testkit.Must(r.Core.CoreV1().Services(namespace).List(ctx, metav1.ListOptions{}))(t)
		var all []string
		for _, s := range list.Items {
			all = append(all, addressesOf(&s)...)
		}
		return strings.Join(all, ",")
	})
	if t.Failed() {
		t.Logf("the end of the log of coil-lb-controller:\n%s", controller.Logs(20))
	}
}

// bootsTwice boots the machine, has its power cut, and boots it without its API server. In a machine it runs what the machine was booted for.
func bootsTwice(t *testing.T, dir string, addresses func() string) {
	disk := filepath.Join(dir, "disk")
	if dir != "" {
		testkit.Must(exec.CommandContext(t.Context(), "mkfs.ext4", "-q", "-F", disk, "1G").CombinedOutput())(t)
	}
	options := vm.Options{Kernel: "6.1", Network: true, Disk: disk, Env: []string{filesEnv + "=" + dir}, Init: []string{"sh", "-ec", prepare + becomeSystemd}}
	first := t.Run("installed", func(t *testing.T) {
		if vmtest.Reexec(t, options, "virtio_net") {
			testInstalled(t)
		}
	})
	if !first {
		return
	}
	if addresses != nil {
		options.Env = append(options.Env, addressesEnv+"="+addresses())
	}
	options.Init = []string{"sh", "-ec", "touch " + apiAway + becomeSystemd}
	t.Run("power cut", func(t *testing.T) {
		if vmtest.Reexec(t, options, "virtio_net") {
			testPowerCut(t)
		}
	})
}

// addressesOf are the addresses that a Service tells.
func addressesOf(s *corev1.Service) (all []string) {
	for _, i := range s.Status.LoadBalancer.Ingress {
		all = append(all, i.IP)
	}
	return all
}

// writeKubeconfig writes a kubeconfig for the machine, with key and certificate beside it as the page has them.
func writeKubeconfig(t *testing.T, cfg *rest.Config, path string) {
	t.Helper()
	base := strings.TrimSuffix(path, ".kubeconfig")
	k := clientcmdapi.NewConfig()
	// The certificate of the server names the host's loopback.
	k.Clusters["coil"] = &clientcmdapi.Cluster{
		Server: strings.Replace(cfg.Host, "127.0.0.1", vm.HostAddr.String(), 1), TLSServerName: "127.0.0.1", CertificateAuthorityData: cfg.CAData,
	}
	k.AuthInfos["coil"] = &clientcmdapi.AuthInfo{ClientCertificate: filepath.Base(base) + ".crt", ClientKey: filepath.Base(base) + ".key"}
	k.Contexts["coil"] = &clientcmdapi.Context{Cluster: "coil", AuthInfo: "coil"}
	k.CurrentContext = "coil"
	testkit.Check(t, clientcmd.WriteToFile(*k, path), os.WriteFile(base+".crt", cfg.CertData, 0o600), os.WriteFile(base+".key", cfg.KeyData, 0o600))
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	in := testkit.Must(os.Open(from))(t)
	defer in.Close()
	out := testkit.Must(os.Create(to))(t)
	_, err := io.Copy(out, in)
	testkit.Check(t, err, out.Close())
}

// sh runs a script, and returns what it says.
func sh(ctx context.Context, script string) (string, error) {
	out, err := exec.CommandContext(ctx, "sh", "-ec", script).CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s: %w: %s", script, err, out)
	}
	return string(out), err
}
