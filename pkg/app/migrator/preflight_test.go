package migrator

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/coil-net/coil/pkg/testkit"
)

// TestPreflightExitCodes runs the command against API servers of which each has a version and no objects.
func TestPreflightExitCodes(t *testing.T) {
	for _, tt := range []struct {
		name, version string
		args          []string
		want          int
	}{
		{"nothing against it", "v1.36.3", nil, 0},
		{"too old", "v1.20.0", nil, 3},
		{"not understood", "strange", nil, 1},
		{"no answer", "", nil, 1},
		{"no image", "v1.36.3", []string{"--skip-nodes=false"}, 2},
		{"no such image", "v1.36.3", []string{"--image=x y"}, 2},
		{"no such flag", "v1.36.3", []string{"--none"}, 2},
		{"help", "", []string{"--help"}, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path != "/version" || tt.version == "" {
					w.WriteHeader(http.StatusNotFound)
					return
				}
				w.Header().Set("Content-Type", "application/json")
				fmt.Fprintf(w, `{"gitVersion": %q}`, tt.version)
			}))
			defer server.Close()
			kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
			testkit.Check(t, os.WriteFile(kubeconfig, fmt.Appendf(nil, `{apiVersion: v1, kind: Config, current-context: c,
  clusters: [{name: c, cluster: {server: %q}}], contexts: [{name: c, context: {cluster: c}}]}`, server.URL), 0o600))
			if got := preflightMain(append([]string{"--kubeconfig", kubeconfig, "--skip-nodes"}, tt.args...)); got != tt.want {
				t.Errorf("exit code %d, want %d", got, tt.want)
			}
		})
	}
}

func TestPreflightFlags(t *testing.T) {
	parse := func(args ...string) *preflightCommand {
		t.Helper()
		p := &preflightCommand{}
		fs := pflag.NewFlagSet("preflight", pflag.ContinueOnError)
		p.AddFlags(fs)
		testkit.Check(t, fs.Parse(args))
		return p
	}
	if p := parse("--image=coil:v3"); p.Validate() != nil || p.Namespace != "kube-system" || p.CNIConfName != "10-coil.conflist" || p.Timeout != 2*time.Minute || p.Variant != "" {
		t.Errorf("defaults %+v, error %v", p, p.Validate())
	}
	if err := parse("--image=coil:v3", "--variant=egress-only", "--cni-conf-name=05-coil.conflist").Validate(); err != nil {
		t.Error(err)
	}
	err := parse("--variant=x", "--cni-conf-name=y", "--namespace=", "--timeout=0s").Validate()
	for _, flag := range []string{"--variant", "--cni-conf-name", "--namespace", "--timeout", "--image"} {
		if err == nil || !strings.Contains(err.Error(), flag) {
			t.Errorf("problems %v don't name %s", err, flag)
		}
	}
	for image, valid := range map[string]bool{
		"coil": true, "coil:dev": true, "localhost/coil:dev": true, "reg.example:5000/net/coil:v3.0.0@sha256:" + strings.Repeat("a0", 32): true,
		"[fd00::1]:5000/a__b/c-d.e": true, "Reg/coil": true,
		"x y": false, "coil:": false, "Coil": false, "coil:v3 ": false, "https://reg/coil": false, "coil@sha256:ab": false, "/coil": false, "-": false,
	} {
		if err := parse("--image=" + image).Validate(); (err == nil) != valid {
			t.Errorf("image %q: error %v", image, err)
		}
	}
}
