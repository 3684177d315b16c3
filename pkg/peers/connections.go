package peers

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/netip"
	"time"

	"k8s.io/klog/v2"
)

// A connection is one of TLS 1.3. Its server has a pair of keys that no one vouches for, made when the program starts. Then both sides
// prove by the key of all nodes that they are the two ends of the same connection: each sends the HMAC of a secret that only these ends can derive
// (RFC 8446, 7.5), of its own role, and of the names of both nodes. Whoever stands between them has a connection with each, of two secrets. So a
// proof says nothing in another connection. No public keys have to be published in objects.
//
//	client  version, name of the client, name of the server, proof     names begin with their length, one byte
//	server  proof                                                      by the same key

const (
	// greeting is how long both sides may take until they know each other.
	greeting = 2 * time.Second
	// mostAccepted is how many connections of others there are at once.
	mostAccepted = 512
	// exporterLabel names the secret, and is never used for another one.
	exporterLabel  = "EXPORTER-coil-floating"
	connectVersion = 1
)

// MostOfOne is how many connections of one address there are at once. It is above what a node opens to another, since this end sees later that a
// connection is over.
const MostOfOne = 128

// role is a side of a connection. No side's proof is that of the other.
type role string

const (
	client role = "client"
	server role = "server"
)

// errStranger says no more: whoever opens such connections needn't know how far they came.
var errStranger = errors.New("the other end of the connection isn't a node that knows the key")

// Dial opens a connection to a node. What is sent can be read and changed by nobody else.
func (p *Peers) Dial(ctx context.Context, node string) (net.Conn, error) {
	keys := p.cfg.Keys()
	s, from, to := p.way(node)
	switch {
	case s == nil:
		return nil, fmt.Errorf("it isn't known where node %s is", node)
	case len(keys) == 0:
		return nil, errors.New("there is no key yet")
	}
	ctx, cancel := context.WithTimeout(ctx, greeting)
	defer cancel()
	// By its address the other node knows that it is of a node.
	d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0))}
	raw, err := d.DialContext(ctx, "tcp", netip.AddrPortFrom(to, uint16(p.cfg.Port)).String())
	if err != nil {
		return nil, fmt.Errorf("connect to node %s: %w", node, err)
	}
	// The proof of the server takes the place of a certificate that somebody vouches for.
	conn := tls.Client(raw, &tls.Config{MinVersion: tls.VersionTLS13, InsecureSkipVerify: true, SessionTicketsDisabled: true})
	if err := limited(ctx, conn, func() error { return p.greet(ctx, conn, node, keys) }); err != nil {
		_ = raw.Close()
		return nil, fmt.Errorf("connect to node %s: %w", node, err)
	}
	return conn, nil
}

// limited does something with a connection that ends with ctx, which has a deadline.
func limited(ctx context.Context, conn net.Conn, do func() error) error {
	end, _ := ctx.Deadline()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	err := errors.Join(conn.SetDeadline(end), do())
	return errors.Join(err, ctx.Err(), conn.SetDeadline(time.Time{}))
}

// greet proves to the server who this is, and checks its proof.
func (p *Peers) greet(ctx context.Context, conn *tls.Conn, node string, keys [][]byte) error {
	if err := conn.HandshakeContext(ctx); err != nil {
		return err
	}
	secret, err := secretOf(conn)
	if err != nil {
		return err
	}
	hello := []byte{connectVersion}
	for _, name := range []string{p.cfg.Node, node} {
		if len(name) > 255 {
			return fmt.Errorf("%q is no name of a node", name)
		}
		hello = append(append(hello, byte(len(name))), name...)
	}
	if _, err := conn.Write(append(hello, proof(keys[0], secret, client, p.cfg.Node, node)...)); err != nil {
		return err
	}
	answer := make([]byte, sha256.Size)
	if _, err := io.ReadFull(conn, answer); err != nil {
		return err
	}
	if proven(keys, answer, secret, server, p.cfg.Node, node) == nil {
		return errStranger
	}
	return nil
}

// welcome checks who the client is, and proves who this is.
func (p *Peers) welcome(ctx context.Context, conn *tls.Conn) (from string, err error) {
	if err := conn.HandshakeContext(ctx); err != nil {
		return "", err
	}
	secret, err := secretOf(conn)
	if err != nil {
		return "", err
	}
	var version, names [1]byte
	if _, err := io.ReadFull(conn, version[:]); err != nil || version[0] != connectVersion {
		return "", errStranger
	}
	var name [2]string
	for i := range name {
		if _, err := io.ReadFull(conn, names[:]); err != nil {
			return "", err
		}
		b := make([]byte, names[0])
		if _, err := io.ReadFull(conn, b); err != nil {
			return "", err
		}
		name[i] = string(b)
	}
	hello := make([]byte, sha256.Size)
	if _, err := io.ReadFull(conn, hello); err != nil {
		return "", err
	}
	key := proven(p.cfg.Keys(), hello, secret, client, name[0], name[1])
	if key == nil || name[1] != p.cfg.Node {
		return "", errStranger
	}
	_, err = conn.Write(proof(key, secret, server, name[0], name[1]))
	return name[0], err
}

// secretOf returns what only the two ends of a connection can derive.
func secretOf(conn *tls.Conn) ([]byte, error) {
	state := conn.ConnectionState()
	return state.ExportKeyingMaterial(exporterLabel, nil, sha256.Size)
}

// proof returns the proof of a side.
func proof(key, secret []byte, by role, from, to string) []byte {
	h := hmac.New(sha256.New, key)
	for _, part := range []string{string(by), from, to, string(secret)} {
		_ = binary.Write(h, binary.BigEndian, uint32(len(part)))
		h.Write([]byte(part))
	}
	return h.Sum(nil)
}

// proven returns the key by which a side has proven who it is, nil if there is none.
func proven(keys [][]byte, got, secret []byte, by role, from, to string) (known []byte) {
	for _, key := range keys {
		if hmac.Equal(got, proof(key, secret, by, from, to)) {
			known = key
		}
	}
	return known
}

// accept takes connections until the socket is closed.
func (p *Peers) accept(ctx context.Context, s *socket, l *net.TCPListener) {
	for {
		raw, err := l.AcceptTCP()
		switch {
		case err == nil:
			p.receiveConn(ctx, raw)
		case p.closed(s):
			return
		default:
			klog.FromContext(ctx).Error(err, "Can't accept connections of other nodes about floating addresses, trying again")
			select {
			case <-ctx.Done():
				return
			case <-time.After(retry):
			}
		}
	}
}

// receiveConn lets a connection be served, unless there are too many, or no node has the address of its other end.
func (p *Peers) receiveConn(ctx context.Context, raw *net.TCPConn) {
	from := raw.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap().WithZone("")
	if why := p.admit(from); why != "" {
		p.connections.WithLabelValues(why).Inc()
		_ = raw.Close()
		return
	}
	p.readers.Go(func() {
		defer p.release(from)
		defer raw.Close()
		p.connections.WithLabelValues(p.serve(ctx, raw)).Inc()
	})
}

// admit counts a connection, or says why it may not be.
func (p *Peers) admit(from netip.Addr) (why string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case !p.known.Load().all[from]:
		return "stranger"
	case p.all >= mostAccepted || p.accepted[from] >= MostOfOne:
		return "refused"
	}
	p.all++
	p.accepted[from]++
	return ""
}

func (p *Peers) release(from netip.Addr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all--
	if p.accepted[from]--; p.accepted[from] == 0 {
		delete(p.accepted, from)
	}
}

// serve serves a connection, and says what became of it.
func (p *Peers) serve(ctx context.Context, raw net.Conn) string {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = raw.Close() })()
	certificate, err := p.certificate()
	if err != nil {
		klog.FromContext(ctx).Error(err, "Can't accept connections of other nodes about floating addresses")
		return "refused"
	}
	conn := tls.Server(raw, &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{*certificate}, SessionTicketsDisabled: true})
	var from string
	known, end := context.WithTimeout(ctx, greeting)
	err = limited(known, conn, func() (err error) {
		from, err = p.welcome(known, conn)
		return err
	})
	end()
	if err != nil {
		klog.FromContext(ctx).V(2).Info("A connection isn't of a node", "from", raw.RemoteAddr(), "reason", err)
		return "foreign"
	}
	p.cfg.Accept(ctx, from, conn)
	_ = conn.Close()
	return "accepted"
}

// newCertificate makes a pair of keys. The names and times of its certificate mean nothing.
func newCertificate() (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make a key: %w", err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(1)}
	der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("make a certificate: %w", err)
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}
