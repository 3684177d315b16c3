package apiserver

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coil-net/coil/pkg/app/coilctl"
	"github.com/coil-net/coil/pkg/testkit"
)

// The archive has the objects of a cluster. It also has the answers that only a real API server gives, such as that a kind isn't installed.
func TestCoilctlSysdump(t *testing.T) {
	c := ipamCluster(t)
	c.pool(t, "blue", 2, v4("10.0.0.0/28"))
	c.node(t, "n1")
	var o output
	path := filepath.Join(t.TempDir(), "a.tar.gz")
	if code := coilctl.Main([]string{"coilctl", "--kubeconfig=" + writeKubeconfig(t, c.admin), "sysdump", "-f", path}, strings.NewReader(""), &o, &o); code != 0 {
		t.Fatalf("exit code %d: %s", code, o.String())
	}
	f := testkit.Must(os.Open(path))(t)
	defer f.Close()
	files := map[string]string{}
	for r := tar.NewReader(testkit.Must(gzip.NewReader(f))(t)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		testkit.Check(t, err)
		files[strings.TrimPrefix(h.Name, "coil-sysdump/")] = string(testkit.Must(io.ReadAll(r))(t))
	}
	for name, part := range map[string]string{
		"versions.yaml": "gitVersion: v", "status.txt": "AddressPool ", "objects/addresspools.yaml": "apiVersion: coil.cybozu.com/v2\nkind: AddressPool\n", "objects/nodes.yaml": "kind: Node\n", "objects/deployments.yaml": "# end",
		"objects/endpointslices.yaml": "# end", "errors.txt": "nodes/n1/coild.json: no pod of coild runs on the node\nnodes/n1/record.json: no pod of coild runs on the node\n",
	} {
		if !strings.Contains(files[name], part) {
			t.Errorf("%s hasn't %q: %s", name, part, files[name])
		}
	}
	if n := strings.Count(files["errors.txt"], "\n"); n != 2 {
		t.Errorf("%d things couldn't be read: %s", n, files["errors.txt"])
	}
}
