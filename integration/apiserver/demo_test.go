package apiserver

import (
	"testing"

	"github.com/coil-net/coil/integration/lab/controlplane"
	"github.com/coil-net/coil/pkg/testkit"
)

// The API server accepts the objects that the demo applies only where the kernel can make tunnels.
func TestDemoIsValid(t *testing.T) {
	api := own(t, controlplane.Options{})
	testkit.Check(t, installCRDs(t.Context(), api.RESTConfig(), readCRDs))
	for _, file := range []string{"pools.yaml", "egress.yaml"} {
		if out, err := api.Kubectl(t.Context(), "apply", "--validate=strict", "-f", "../demo/"+file); err != nil {
			t.Errorf("%s: %v: %s", file, err, out)
		}
	}
}
