package pki

import (
	"crypto/x509"
	"encoding/pem"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/client-go/tools/clientcmd"
)

func TestAuthoritySurvivesReopening(t *testing.T) {
	dir := t.TempDir()
	first, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	again, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	if string(first.CA()) != string(again.CA()) {
		t.Fatal("reopening made another CA")
	}
	certPEM, _, err := again.Issue(Subject{
		User: "server", Groups: []string{"g"},
		DNSNames: []string{"localhost"}, Addrs: []netip.Addr{netip.MustParseAddr("fd00::1")},
	})
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(first.CA())
	block, _ := pem.Decode(certPEM)
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	for _, host := range []string{"localhost", "fd00::1"} {
		_, err := cert.Verify(x509.VerifyOptions{Roots: roots, DNSName: host, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
		if err != nil {
			t.Errorf("verify as %s: %v", host, err)
		}
	}
}

func TestClientCertificateDoesNotServe(t *testing.T) {
	a, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	c, err := a.Kubeconfig("https://127.0.0.1:6443", "lab", Subject{User: "alice", Groups: []string{"system:masters"}})
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := clientcmd.NewDefaultClientConfig(*c, nil).ClientConfig()
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(cfg.CertData)
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, cert.ExtKeyUsage); d != "" {
		t.Errorf("usages (-want +got):\n%s", d)
	}
	if cert.Subject.CommonName != "alice" || cert.Subject.Organization[0] != "system:masters" {
		t.Errorf("subject is %s", cert.Subject)
	}
}
