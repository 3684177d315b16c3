package page

import (
	"bufio"
	"bytes"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/coil-net/coil/generated/clientset/versioned"
	"github.com/coil-net/coil/integration/browser"
	"github.com/coil-net/coil/integration/guide"
	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/integration/lab/controlplane"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/app/coilctl"
	"github.com/coil-net/coil/pkg/testkit"
)

// serve starts "coilctl serve" for an API server, and returns its address. It ends with the test, or by the result, as by Ctrl-C.
func serve(t *testing.T, kubeconfig string) (address string, end func()) {
	t.Helper()
	caught := make(chan os.Signal, 1)
	signal.Notify(caught, os.Interrupt) // the command has ended itself, perhaps, and the process must not
	t.Cleanup(func() { signal.Stop(caught) })
	r, w := io.Pipe()
	var errOut bytes.Buffer
	ended := make(chan int, 1)
	go func() {
		code := coilctl.Main([]string{"coilctl", "serve", "--listen=127.0.0.1:0", "--kubeconfig=" + kubeconfig}, strings.NewReader(""), w, &errOut)
		w.Close()
		ended <- code
	}()
	url, err := bufio.NewReader(r).ReadString('\n')
	if err != nil {
		t.Fatalf("it tells no address: %s", errOut.String())
	}
	end = sync.OnceFunc(func() {
		testkit.Check(t, syscall.Kill(os.Getpid(), syscall.SIGINT))
		select {
		case code := <-ended:
			if code != 0 || errOut.Len() > 0 {
				t.Errorf("exit code %d, %s", code, errOut.String())
			}
		case <-time.After(testkit.Timeout(20 * time.Second)):
			t.Error("it goes on")
		}
	})
	t.Cleanup(end)
	return strings.TrimSpace(url), end
}

// operator returns the kubeconfig of somebody who has the rights that the help names, and no others.
func operator(t *testing.T, api *controlplane.API, c kubernetes.Interface) string {
	t.Helper()
	var help, errOut bytes.Buffer
	coilctl.Main([]string{"coilctl", "serve", "--help"}, strings.NewReader(""), &help, &errOut)
	const user = "operator"
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: user}, Rules: guide.Rights(t, help.String())}
	testkit.Must(c.RbacV1().ClusterRoles().Create(t.Context(), role, metav1.CreateOptions{}))(t)
	testkit.Must(c.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: user}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: user},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}},
	}, metav1.CreateOptions{}))(t)
	cfg := testkit.Must(api.UserConfig(user))(t)
	path := filepath.Join(t.TempDir(), "kubeconfig")
	testkit.Check(t, clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters:  map[string]*clientcmdapi.Cluster{"c": {Server: cfg.Host, CertificateAuthority: cfg.CAFile, CertificateAuthorityData: cfg.CAData}},
		AuthInfos: map[string]*clientcmdapi.AuthInfo{"u": {ClientCertificateData: cfg.CertData, ClientKeyData: cfg.KeyData}},
		Contexts:  map[string]*clientcmdapi.Context{"test": {Cluster: "c", AuthInfo: "u"}}, CurrentContext: "test",
	}, path))
	return path
}

// newAPI starts an API server with the kinds of Coil.
func newAPI(t *testing.T) *controlplane.API {
	t.Helper()
	api := testkit.Must(controlplane.StartAPI(t.Context(), controlplane.Options{Log: os.Stderr}))(t)
	t.Cleanup(func() { testkit.Check(t, api.Stop()) })
	root := testkit.Must(build.Root())(t)
	testkit.Must(api.Kubectl(t.Context(), "apply", "-k", filepath.Join(root, "manifests/crd")))(t)
	testkit.Must(api.Kubectl(t.Context(), "wait", "--for=condition=Established", "--timeout=60s", "crd", "--all"))(t)
	return api
}

// The page shows the objects of an API server, what changes there within a second, and since when the API server, or the program, is away.
func TestServe(t *testing.T) {
	testkit.Need(t, testkit.APIServer)
	ctx := t.Context()
	api := newAPI(t)
	coil := testkit.Must(versioned.NewForConfig(api.RESTConfig()))(t).CoilV2()
	clients := testkit.Must(kubernetes.NewForConfig(api.RESTConfig()))(t)
	core := clients.CoreV1()
	b := newBuilder(t)
	p := testkit.Must(coil.AddressPools().Create(ctx, b.pool("blue", 2, "10.0.0.0/28", "", nil), metav1.CreateOptions{}))(t)
	b.node(1, "n1", true, true)
	node := testkit.Must(core.Nodes().Create(ctx, b.Nodes[0], metav1.CreateOptions{}))(t)
	node.Status.Conditions = b.Nodes[0].Status.Conditions
	testkit.Must(core.Nodes().UpdateStatus(ctx, node, metav1.UpdateOptions{}))(t)
	block := testkit.Must(coil.AddressBlocks().Create(ctx, b.hold(p, 1, "n1", 0, 0), metav1.CreateOptions{}))(t)

	url, end := serve(t, operator(t, api, clients))
	page := browser.New(t).Open(url, 1280)
	drawn(t, page)
	page.Wants("!problems.children.length") // the API server may learn of rights a moment later
	for selector, want := range map[string]string{
		"#state": "live", "#problems": "", "figure .says": "1 of 4 blocks held, 0 of their 4 addresses in use", "#nodes-table tbody th": "n1", "#count-services": "", "#services-note": "Coil serves no Service of the type LoadBalancer.",
	} {
		if got := page.Text(selector); !strings.HasPrefix(got, want) {
			t.Errorf("%s is %q, want %q", selector, got, want)
		}
	}

	block.Status.Allocated = 3
	began := time.Now()
	testkit.Must(coil.AddressBlocks().UpdateStatus(ctx, block, metav1.UpdateOptions{}))(t)
	page.Wants("document.querySelector('figure .says').innerText.includes('3 of their 4 addresses in use')")
	took := time.Since(began)
	t.Logf("a change is there after %s", took)
	if took > testkit.Timeout(time.Second) { // the API server's own time is in it
		t.Errorf("a change is there after %s", took)
	}
	testkit.Must(core.Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "internet"}}, metav1.CreateOptions{}))(t)
	testkit.Must(coil.Egresses("internet").Create(ctx, &v2.Egress{ObjectMeta: metav1.ObjectMeta{Name: "nat"}, Spec: v2.EgressSpec{Replicas: 2, Destinations: []string{"0.0.0.0/0"}}}, metav1.CreateOptions{}))(t)
	page.Wants("document.querySelector('#egresses-list h3')?.innerText.startsWith('internet/nat')")
	page.Silent()

	api.StopServer()
	page.Wants("document.querySelector('#state').innerText.startsWith(\"the API server doesn't answer since\")")
	testkit.Check(t, api.StartServer(ctx))
	page.Wants("document.querySelector('#state').innerText === 'live'")
	testkit.Check(t, coil.Egresses("internet").Delete(ctx, "nat", metav1.DeleteOptions{}))
	page.Wants("!document.querySelector('#egresses-list h3')")
	end()
	page.Wants("document.querySelector('#state').innerText.startsWith('disconnected since')")
}
