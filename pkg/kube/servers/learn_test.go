package servers

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/testkit"
)

func pemOf(c *x509.Certificate) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw})
}

// slice is an EndpointSlice with a port of a name, and endpoints.
func slice(name string, number int32, endpoints ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{Ports: []discoveryv1.EndpointPort{{Name: &name, Port: &number}}, Endpoints: endpoints}
}

func endpoint(ready *bool, all ...string) discoveryv1.Endpoint {
	return discoveryv1.Endpoint{Addresses: all, Conditions: discoveryv1.EndpointConditions{Ready: ready}}
}

func TestAddresses(t *testing.T) {
	udp := slice("https", 6443, endpoint(nil, "192.0.2.1"))
	udp.Ports[0].Protocol = new(corev1.ProtocolUDP)
	var many []discoveryv1.Endpoint
	for i := range 2 * most {
		many = append(many, endpoint(nil, fmt.Sprint("192.0.2.", i)))
	}
	for _, tt := range []struct {
		name string
		all  []*discoveryv1.EndpointSlice
		want []netip.AddrPort
	}{
		{"none", nil, nil},
		{"two families, sorted", []*discoveryv1.EndpointSlice{slice("https", 6443, endpoint(nil, "fd00::1")), slice("https", 6443, endpoint(nil, "192.0.2.2"), endpoint(new(true), "192.0.2.1"))},
			addrs("192.0.2.1:6443", "192.0.2.2:6443", "[fd00::1]:6443")},
		{"one twice", []*discoveryv1.EndpointSlice{slice("https", 6443, endpoint(nil, "192.0.2.1")), slice("https", 6443, endpoint(nil, "192.0.2.1"))}, addrs("192.0.2.1:6443")},
		{"not ready", []*discoveryv1.EndpointSlice{slice("https", 6443, endpoint(new(false), "192.0.2.1"), endpoint(nil, "192.0.2.2"))}, addrs("192.0.2.2:6443")},
		{"another port", []*discoveryv1.EndpointSlice{slice("metrics", 6443, endpoint(nil, "192.0.2.1"))}, nil},
		{"another protocol", []*discoveryv1.EndpointSlice{udp}, nil},
		{"no addresses", []*discoveryv1.EndpointSlice{slice("https", 6443, endpoint(nil, "example.com", "0.0.0.0")), slice("https", 0, endpoint(nil, "192.0.2.1"))}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := addresses(tt.all); !slices.Equal(got, tt.want) {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
	if got := addresses([]*discoveryv1.EndpointSlice{slice("https", 6443, many...)}); len(got) != most {
		t.Errorf("%d addresses are remembered, want %d", len(got), most)
	}
}

// What was learned is known after a restart. A damaged file is ignored, and written anew.
func TestFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "servers")
	start := func() *Servers {
		t.Helper()
		return testkit.Must(Use(t.Context(), &rest.Config{Host: "https://" + clusterIP}, file))(t)
	}
	known := []*discoveryv1.EndpointSlice{slice("https", 6443, endpoint(nil, "192.0.2.1", "fd00::1"))}
	want := addrs("192.0.2.1:6443", "[fd00::1]:6443")
	for _, before := range []string{"", "{", "{}", `{"servers":[]}`, `{"servers":["192.0.2.9"]}`, `{"servers":["192.0.2.9:0"]}`, `{"servers":["192.0.2.9:1",":0"]}`, "\x00\x00", `{"servers":["192.0.2.9:6443"]}`} {
		testkit.Check(t, os.WriteFile(file, []byte(before), 0o644))
		s := start()
		if now, ok := s.others(), strings.Contains(before, "9:6443"); ok != slices.Equal(now, []string{"192.0.2.9:6443"}) || !ok && len(now) > 0 {
			t.Errorf("after %q it knows %v", before, now)
		}
		testkit.Check(t, s.learn(t.Context(), known))
		if after := start().addrs; !slices.Equal(after, want) {
			t.Errorf("after %q and a restart it knows %v", before, after)
		}
		if info := testkit.Must(os.Stat(file))(t); info.Mode().Perm() != 0o600 {
			t.Errorf("the file's mode is %s", info.Mode())
		}
	}
	s := start()
	testkit.Check(t, s.learn(t.Context(), nil), s.learn(t.Context(), []*discoveryv1.EndpointSlice{slice("https", 6443, endpoint(new(false), "192.0.2.7"))}))
	if !slices.Equal(s.addrs, want) || !slices.Equal(start().addrs, want) {
		t.Errorf("without an endpoint it knows %v", s.addrs)
	}
	before := testkit.Must(os.Stat(file))(t)
	testkit.Check(t, s.learn(t.Context(), known))
	if after := testkit.Must(os.Stat(file))(t); !os.SameFile(before, after) {
		t.Error("the file is written without a change")
	}
}

// A file that can't be written is written when it can.
func TestFileComesLater(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "later")
	s := &Servers{file: filepath.Join(dir, "servers"), host: clusterIP}
	known := []*discoveryv1.EndpointSlice{slice("https", 6443, endpoint(nil, "192.0.2.1"))}
	if err := s.learn(t.Context(), known); err == nil || len(s.others()) != 1 {
		t.Errorf("without the folder: %v, it knows %v", err, s.others())
	}
	testkit.Check(t, os.Mkdir(dir, 0o700), s.learn(t.Context(), known))
	if _, err := os.Stat(s.file); err != nil {
		t.Error(err)
	}
}

// Only the EndpointSlices of the Service kubernetes are watched.
func TestRun(t *testing.T) {
	asked := make(chan string, 100)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked <- r.URL.Path + " " + r.URL.Query().Get("labelSelector")
		w.Header().Set("Content-Type", "application/json")
		switch {
		case r.URL.Query().Get("sendInitialEvents") == "true":
			w.WriteHeader(http.StatusUnprocessableEntity) // as a server without WatchList
			_, _ = w.Write([]byte(`{"apiVersion":"v1","kind":"Status","status":"Failure","reason":"Invalid","code":422}`))
		case r.URL.Query().Get("watch") != "":
			w.WriteHeader(http.StatusOK)
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		default:
			list := discoveryv1.EndpointSliceList{TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSliceList"}, ListMeta: metav1.ListMeta{ResourceVersion: "1"}}
			list.Items = append(list.Items, *slice("https", 6443, endpoint(nil, "192.0.2.1")))
			list.Items[0].Name, list.Items[0].Namespace = "kubernetes", "default"
			if err := json.NewEncoder(w).Encode(list); err != nil {
				t.Error(err)
			}
		}
	}))
	defer server.Close()
	clients := testkit.Must(kube.NewClients(&rest.Config{Host: server.URL}))(t)
	s := &Servers{file: filepath.Join(t.TempDir(), "servers"), host: clusterIP}
	done := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { done <- s.Run(ctx, clients.Discovery) }()
	testkit.Eventually(t, 10*time.Second, "the address is known", func() error {
		if now := s.others(); !slices.Equal(now, []string{"192.0.2.1:6443"}) {
			return fmt.Errorf("it knows %v", now)
		}
		_, err := os.Stat(s.file)
		return err
	})
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	close(asked)
	for what := range asked {
		if what != "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices kubernetes.io/service-name=kubernetes" {
			t.Errorf("it asks for %s", what)
		}
	}
}
