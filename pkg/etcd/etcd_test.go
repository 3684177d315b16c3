package etcd

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/testkit"
)

// TestClientCertificate says what is wrong when a server wants a certificate of the client, which has none or the wrong one.
func TestClientCertificate(t *testing.T) {
	for _, tt := range []struct {
		name    string
		auth    tls.ClientAuthType
		version uint16
		cert    bool
		missing bool   // the error is ErrNoCertificate
		says    string // what the error says, too
	}{
		{"TLS 1.3", tls.RequireAndVerifyClientCert, tls.VersionTLS13, false, true, "certificate required"},
		{"TLS 1.2", tls.RequireAndVerifyClientCert, tls.VersionTLS12, false, true, ""},
		{"of another authority", tls.RequireAndVerifyClientCert, tls.VersionTLS13, true, false, "remote error: tls: "},
		{"none is wanted", tls.NoClientCert, tls.VersionTLS13, false, false, "deadline"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel() // each waits for seconds
			server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				<-r.Context().Done() // as an etcd without a leader
			}))
			server.EnableHTTP2 = true
			server.Config.ErrorLog = log.New(io.Discard, "", 0)
			server.TLS = &tls.Config{ClientAuth: tt.auth, MinVersion: tt.version, MaxVersion: tt.version, ClientCAs: x509.NewCertPool()}
			server.StartTLS()
			defer server.Close()

			dir := t.TempDir()
			o := Options{Endpoints: []string{"https://" + server.Listener.Addr().String()}, Timeout: 2 * time.Second, CA: filepath.Join(dir, "ca.crt")}
			writePEM(t, o.CA, "CERTIFICATE", server.Certificate().Raw)
			if tt.cert {
				o.Cert, o.Key = o.CA, filepath.Join(dir, "key")
				writePEM(t, o.Key, "PRIVATE KEY", testkit.Must(x509.MarshalPKCS8PrivateKey(server.TLS.Certificates[0].PrivateKey))(t))
			}
			_, _, err := Read(t.Context(), o, "/coil/")
			if !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, ErrNoCertificate) != tt.missing || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("error %v, want one that says %q; that the certificate is missing: %v", err, tt.says, tt.missing)
			}
		})
	}
}

func writePEM(t *testing.T, file, kind string, content []byte) {
	t.Helper()
	testkit.Check(t, os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: content}), 0o600))
}
