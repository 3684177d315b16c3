package kube

import (
	"path/filepath"
	"testing"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// A pod that waits for a block must not wait for a limit inside of its node's coild.
func TestConfigHasNoRateLimit(t *testing.T) {
	cfg, err := Config(kubeconfig(t, "https://192.0.2.1"), "program")
	if err != nil {
		t.Fatal(err)
	}
	if cfg.QPS >= 0 || cfg.RateLimiter != nil {
		t.Errorf("QPS is %v, want a negative one: no limit (rest.Config)", cfg.QPS)
	}
	if cfg.UserAgent != "program" {
		t.Errorf("the user agent is %q", cfg.UserAgent)
	}
}

// kubeconfig writes a file for a server, and returns its path.
func kubeconfig(t *testing.T, server string) string {
	t.Helper()
	k := clientcmdapi.NewConfig()
	k.Clusters["c"] = &clientcmdapi.Cluster{Server: server}
	k.Contexts["c"] = &clientcmdapi.Context{Cluster: "c"}
	k.CurrentContext = "c"
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(*k, path); err != nil {
		t.Fatal(err)
	}
	return path
}
