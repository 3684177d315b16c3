package kube

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/coil-net/coil/pkg/testkit"
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

// All clients of a program have one connection, also if it has a way of its own to connect.
func TestClientsShareConnections(t *testing.T) {
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"apiVersion":"v1","kind":"NodeList"}`)
	}))
	server.EnableHTTP2 = true
	server.StartTLS()
	defer server.Close()
	var dials atomic.Int32
	cfg := &rest.Config{Host: server.URL, QPS: -1, TLSClientConfig: rest.TLSClientConfig{Insecure: true}}
	cfg.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		dials.Add(1)
		return new(net.Dialer).DialContext(ctx, network, address)
	}
	Patient(cfg)
	c := testkit.Must(NewClients(cfg))(t)
	for range 2 {
		_, err := c.Metadata.Resource(corev1.SchemeGroupVersion.WithResource("nodes")).List(t.Context(), metav1.ListOptions{})
		testkit.Check(t, err, get(t.Context(), c.Core, "nodes"), get(t.Context(), c.Discovery, "nodes"), get(t.Context(), c.Coil.RESTClient(), "nodes"))
	}
	if n := dials.Load(); n != 1 {
		t.Errorf("there are %d connections, want 1", n)
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
