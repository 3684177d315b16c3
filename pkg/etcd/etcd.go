// Package etcd reads keys of an etcd, all in the state of one moment.
//
// It owns how etcd is spoken to. It must not know what the keys mean, and writes none.
package etcd

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// Options say which etcd is meant, and who asks.
type Options struct {
	Endpoints []string      // URLs, or host:port
	Timeout   time.Duration // of the connection, and of each request
	// Username and Password are of a user of etcd; both are empty without authentication.
	Username, Password string
	// CA, Cert and Key are files in PEM format. With none of them the connection has no TLS, unless an endpoint begins
	// with https://. Cert and Key are the client's.
	CA, Cert, Key string
}

// Validate returns all that is wrong with the options.
func (o Options) Validate() error {
	var errs []error
	if len(o.Endpoints) == 0 {
		errs = append(errs, errors.New("there is no endpoint"))
	}
	if o.Timeout <= 0 {
		errs = append(errs, fmt.Errorf("the timeout %v isn't positive", o.Timeout))
	}
	if (o.Cert == "") != (o.Key == "") {
		errs = append(errs, errors.New("the client's certificate and its key belong together"))
	}
	if o.Username == "" && o.Password != "" {
		errs = append(errs, errors.New("there is a password, but no user"))
	}
	return errors.Join(errs...)
}

// KeyValue is a key with its value.
type KeyValue struct {
	Key   string
	Value []byte
}

// page is how many keys one answer has: etcd holds an answer in memory as a whole.
const page = 1000

// Read returns the keys that begin with prefix, sorted, as they were at one revision, which it returns too. It fails if
// etcd compacts that revision meanwhile.
func Read(ctx context.Context, o Options, prefix string) (kvs []KeyValue, revision int64, err error) {
	c, err := connect(ctx, o)
	if err != nil {
		return nil, 0, err
	}
	defer func() { err = errors.Join(err, c.Close()) }()

	end := clientv3.GetPrefixRangeEnd(prefix)
	for from := prefix; ; {
		got, err := get(ctx, o, c, from, clientv3.WithRange(end), clientv3.WithLimit(page), clientv3.WithRev(revision))
		if err != nil {
			return nil, 0, fmt.Errorf("read the keys below %q of etcd %q: %w", prefix, o.Endpoints, o.explain(ctx, err))
		}
		if revision == 0 {
			revision = got.Header.Revision // later answers have etcd's newest one there
		}
		for _, kv := range got.Kvs {
			kvs = append(kvs, KeyValue{Key: string(kv.Key), Value: kv.Value})
		}
		if !got.More {
			return kvs, revision, nil
		}
		from = string(got.Kvs[len(got.Kvs)-1].Key) + "\x00"
	}
}

// get is one request, with its own timeout.
func get(ctx context.Context, o Options, c *clientv3.Client, key string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, o.Timeout)
	defer cancel()
	return c.Get(ctx, key, opts...)
}

func connect(ctx context.Context, o Options) (*clientv3.Client, error) {
	cfg := clientv3.Config{
		Endpoints: o.Endpoints, DialTimeout: o.Timeout, Username: o.Username, Password: o.Password,
		Context: ctx, Logger: zap.NewNop(), // what is wrong is in the errors
	}
	var err error
	if cfg.TLS, err = TLS(o); err != nil {
		return nil, err
	}
	c, err := clientv3.New(cfg)
	if err != nil {
		return nil, fmt.Errorf("connect to etcd %q: %w", o.Endpoints, o.explain(ctx, err))
	}
	return c, nil
}

// explain adds to a timeout what is wrong with the connection to each endpoint: etcd's client tries again silently until
// the time is over.
func (o Options) explain(ctx context.Context, err error) error {
	if !errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, o.Timeout)
	defer cancel()
	for _, e := range o.Endpoints {
		if dialErr := o.dial(ctx, e); dialErr != nil {
			err = fmt.Errorf("%w; %s: %w", err, e, dialErr)
		}
	}
	return err
}

// ErrNoCertificate says that etcd asked for a client's certificate, and none is given: whoever has one should give it.
var ErrNoCertificate = errors.New("etcd asks for a client's certificate, and none is given")

// alertWait is how long an alert is waited for after the handshake. A server of TLS 1.3 looks at the client's certificate
// only then.
const alertWait = time.Second

// dial makes a connection as etcd's client does, and closes it. An error says what is wrong with it.
func (o Options) dial(ctx context.Context, endpoint string) error {
	scheme, host, ok := strings.Cut(endpoint, "://")
	if !ok {
		scheme, host = "", endpoint
	}
	cfg, err := TLS(o)
	if err != nil {
		return err
	}
	if cfg == nil && scheme != "https" {
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", host)
		if err != nil {
			return err
		}
		return conn.Close()
	}
	if cfg == nil {
		cfg = &tls.Config{MinVersion: tls.VersionTLS12}
	}
	cfg.NextProtos = []string{"h2"} // gRPC's
	asked := false
	if o.Cert == "" {
		cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			asked = true
			return new(tls.Certificate), nil // none
		}
	}
	err = refusal(ctx, cfg, host)
	if asked {
		if err == nil {
			return ErrNoCertificate
		}
		return fmt.Errorf("%w: %w", ErrNoCertificate, err)
	}
	return err
}

// refusal returns why there is no connection with TLS, or why the server ends it at once.
func refusal(ctx context.Context, cfg *tls.Config, host string) error {
	conn, err := (&tls.Dialer{Config: cfg}).DialContext(ctx, "tcp", host)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetReadDeadline(time.Now().Add(alertWait)); err != nil {
		return err
	}
	_, err = conn.Read(make([]byte, 1))
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil // it waits for a request, as it should
	}
	return err
}

// TLS returns the client's side of TLS. It is nil if no file is named: the client then speaks TLS where an endpoint says so.
func TLS(o Options) (*tls.Config, error) {
	if o.CA == "" && o.Cert == "" {
		return nil, nil
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12}
	if o.CA != "" {
		pem, err := os.ReadFile(o.CA)
		if err != nil {
			return nil, fmt.Errorf("read the certificates of authorities for etcd: %w", err)
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s has no certificate in PEM format", o.CA)
		}
	}
	if o.Cert != "" {
		pair, err := tls.LoadX509KeyPair(o.Cert, o.Key)
		if err != nil {
			return nil, fmt.Errorf("read the client's certificate for etcd: %w", err)
		}
		c.Certificates = []tls.Certificate{pair}
	}
	return c, nil
}
