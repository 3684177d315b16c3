// Package pki issues the certificates and kubeconfigs of one lab cluster. It owns one CA per
// cluster; it knows nothing of who uses what it issues.
package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// lifetime is that of every certificate. A lab lives for hours; a year keeps a forgotten one usable.
const lifetime = 365 * 24 * time.Hour

// Names of the files in an Authority's directory.
const (
	CACertFile         = "ca.crt"
	CAKeyFile          = "ca.key"
	ServiceAccountFile = "sa.key" // the private key of ServiceAccount tokens; it verifies them too
)

// Authority is a CA with its directory.
type Authority struct {
	dir  string
	cert *x509.Certificate
	pem  []byte
	key  *ecdsa.PrivateKey
}

// Subject is the identity in a certificate.
type Subject struct {
	User   string   // common name
	Groups []string // organizations
	// DNSNames and Addrs make it a serving certificate.
	DNSNames []string
	Addrs    []netip.Addr
}

// Open loads the CA in dir, or makes one with a key for ServiceAccount tokens when dir has none.
func Open(dir string) (*Authority, error) {
	a := &Authority{dir: dir}
	if _, err := os.Stat(a.Path(CACertFile)); err == nil {
		return a, a.load()
	} else if !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	return a, a.create()
}

// Path returns the path of a file in the authority's directory.
func (a *Authority) Path(name string) string { return filepath.Join(a.dir, name) }

// CA returns the CA's certificate in PEM.
func (a *Authority) CA() []byte { return a.pem }

func (a *Authority) create() error {
	sa, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	if err := writeKey(a.Path(ServiceAccountFile), sa); err != nil {
		return err
	}
	if a.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		return err
	}
	template, err := newTemplate(pkix.Name{CommonName: "coil-lab"})
	if err != nil {
		return err
	}
	template.IsCA = true
	template.BasicConstraintsValid = true
	template.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, template, template, a.key.Public(), a.key)
	if err != nil {
		return fmt.Errorf("create CA: %w", err)
	}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		return err
	}
	a.pem = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	if err := writeKey(a.Path(CAKeyFile), a.key); err != nil {
		return err
	}
	// The certificate comes last: its presence says that the directory is complete.
	return os.WriteFile(a.Path(CACertFile), a.pem, 0o644)
}

func (a *Authority) load() error {
	var err error
	if a.pem, err = os.ReadFile(a.Path(CACertFile)); err != nil {
		return err
	}
	block, _ := pem.Decode(a.pem)
	if block == nil {
		return fmt.Errorf("read %s: not PEM", a.Path(CACertFile))
	}
	if a.cert, err = x509.ParseCertificate(block.Bytes); err != nil {
		return fmt.Errorf("read %s: %w", a.Path(CACertFile), err)
	}
	b, err := os.ReadFile(a.Path(CAKeyFile))
	if err != nil {
		return err
	}
	if block, _ = pem.Decode(b); block == nil {
		return fmt.Errorf("read %s: not PEM", a.Path(CAKeyFile))
	}
	if a.key, err = x509.ParseECPrivateKey(block.Bytes); err != nil {
		return fmt.Errorf("read %s: %w", a.Path(CAKeyFile), err)
	}
	return nil
}

// Issue returns a certificate and its key for s, both in PEM.
func (a *Authority) Issue(s Subject) (cert, key []byte, err error) {
	template, err := newTemplate(pkix.Name{CommonName: s.User, Organization: s.Groups})
	if err != nil {
		return nil, nil, err
	}
	template.KeyUsage = x509.KeyUsageDigitalSignature
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	template.DNSNames = s.DNSNames
	for _, addr := range s.Addrs {
		template.IPAddresses = append(template.IPAddresses, net.IP(addr.AsSlice()))
	}
	if len(s.DNSNames)+len(s.Addrs) > 0 {
		template.ExtKeyUsage = append(template.ExtKeyUsage, x509.ExtKeyUsageServerAuth)
	}
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, k.Public(), a.key)
	if err != nil {
		return nil, nil, fmt.Errorf("issue certificate for %s: %w", s.User, err)
	}
	kder, err := x509.MarshalECPrivateKey(k)
	if err != nil {
		return nil, nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: kder}), nil
}

// WriteCert issues a certificate for s into base.crt and base.key of dir.
func (a *Authority) WriteCert(dir, base string, s Subject) error {
	cert, key, err := a.Issue(s)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, base+".crt"), cert, 0o644); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, base+".key"), key, 0o600)
}

// Kubeconfig returns a kubeconfig with an own client certificate for s, for the API server at
// the URL server. Everything is inline, so that the file works wherever it is copied.
func (a *Authority) Kubeconfig(server, cluster string, s Subject) (*clientcmdapi.Config, error) {
	cert, key, err := a.Issue(s)
	if err != nil {
		return nil, err
	}
	c := clientcmdapi.NewConfig()
	c.Clusters[cluster] = &clientcmdapi.Cluster{Server: server, CertificateAuthorityData: a.pem}
	c.AuthInfos[s.User] = &clientcmdapi.AuthInfo{ClientCertificateData: cert, ClientKeyData: key}
	c.Contexts[cluster] = &clientcmdapi.Context{Cluster: cluster, AuthInfo: s.User}
	c.CurrentContext = cluster
	return c, nil
}

// WriteKubeconfig writes what Kubeconfig returns to path, readable by its owner only.
func (a *Authority) WriteKubeconfig(path, server, cluster string, s Subject) error {
	c, err := a.Kubeconfig(server, cluster, s)
	if err != nil {
		return err
	}
	if err := clientcmd.WriteToFile(*c, path); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

func newTemplate(name pkix.Name) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, err
	}
	now := time.Now()
	return &x509.Certificate{
		SerialNumber: serial,
		Subject:      name,
		// An hour back: a VM's clock may lag behind its host's.
		NotBefore: now.Add(-time.Hour),
		NotAfter:  now.Add(lifetime),
	}, nil
}

func writeKey(path string, k *ecdsa.PrivateKey) error {
	der, err := x509.MarshalECPrivateKey(k)
	if err != nil {
		return err
	}
	return os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), 0o600)
}
