// Package servers reaches the API servers of a cluster by addresses of their own when the Service kubernetes doesn't lead to one.
//
// It owns which addresses a program dials, and the file in which it remembers them. It must not know what is asked of an API server.
package servers

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
)

const (
	// alone is how long the Service is dialed before API servers themselves are, too.
	alone = time.Second
	// apart is the time between the first packets to two API servers, as RFC 8305 (section 5) has it.
	apart = 250 * time.Millisecond
	// dialTimeout is that of all attempts together, as client-go has it.
	dialTimeout = 30 * time.Second
	// probe is after how long the kernel asks whether the other end of a silent connection is there.
	probe = 3 * time.Second
	// lost is how long the other end may be silent when it should answer. Then the connection is broken. client-go alone notices that after
	// 45 s, by pings of HTTP/2; such pings would be work for API servers, and those of the kernel are none.
	lost = 5 * time.Second
)

// Servers are the API servers of a cluster. A program in a pod knows the ClusterIP of the Service kubernetes, which needs the rules of the
// node's Service proxy. A node on which these are missing could still reach each API server.
type Servers struct {
	file string
	host string // of the Service, with its port
	dial func(ctx context.Context, network, address string) (net.Conn, error)

	own atomic.Bool // the last connection was to an API server's own address

	mu    sync.Mutex // of addrs
	addrs []netip.AddrPort
	// saved is what the file has; only for learn.
	saved []netip.AddrPort
}

// Use makes clients of cfg dial API servers when the host of cfg, a URL, can't be reached. Their addresses are those of the file, which needn't be
// there, until Run knows better. All else stays as it is: a server must have a certificate for the host of cfg.
func Use(ctx context.Context, cfg *rest.Config, file string) (*Servers, error) {
	u, err := url.Parse(cfg.Host)
	if err != nil {
		return nil, fmt.Errorf("the API server's URL: %w", err)
	}
	if u.Scheme != "https" || u.Port() == "" {
		return nil, fmt.Errorf("the API server's URL %s isn't one of https with a port", u)
	}
	dialer := &net.Dialer{
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: probe, Interval: probe},
		ControlContext:  loseSoon,
	}
	s := &Servers{file: file, host: u.Host, dial: dialer.DialContext}
	s.load(ctx)
	cfg.Dial = s.Dial
	return s, nil
}

// loseSoon makes the kernel break a connection, or give up to open it, when the other end is lost.
func loseSoon(_ context.Context, _, _ string, c syscall.RawConn) error {
	var err error
	control := c.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(lost.Milliseconds()))
	})
	return errors.Join(control, err)
}

// attempt is one to connect to an address.
type attempt struct {
	address string
	conn    net.Conn
	err     error
}

// Dial connects to the address of the Service, or to an API server if that takes longer than a second or fails. The first connection that is made
// counts. Other addresses, as of an HTTP proxy, are just dialed.
func (s *Servers) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	next := []string{address}
	if address == s.host {
		next = append(next, s.others()...)
	}
	done, running := make(chan attempt, len(next)), 0
	begin := func() {
		to := next[0]
		next = next[1:]
		running++
		go func() {
			conn, err := s.dial(ctx, network, to)
			done <- attempt{to, conn, err}
		}()
	}
	begin()
	turn := time.NewTimer(alone)
	defer turn.Stop()
	var errs []error
	for running > 0 {
		select {
		case <-turn.C:
		case a := <-done:
			running--
			if a.err == nil {
				cancel()
				for range running {
					if late := <-done; late.err == nil {
						_ = late.conn.Close()
					}
				}
				if address == s.host {
					s.reached(ctx, a.address)
				}
				return a.conn, nil
			}
			errs = append(errs, a.err)
		}
		if len(next) > 0 {
			begin()
			turn.Reset(apart)
		}
	}
	return nil, errors.Join(errs...)
}

// reached tells people when another way leads to an API server than before.
func (s *Servers) reached(ctx context.Context, address string) {
	own := address != s.host
	if s.own.Swap(own) == own {
		return
	}
	if log := klog.FromContext(ctx).WithValues("service", s.host); own {
		log.Info("An API server is reached by its own address, and not by the Service kubernetes: see whether the node's Service proxy works", "server", address)
	} else {
		log.Info("An API server is reached by the Service kubernetes again")
	}
}

// others returns the addresses of API servers in random order: one that leads elsewhere by now is the first one only sometimes.
func (s *Servers) others() (all []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, a := range s.addrs {
		if text := a.String(); text != s.host {
			all = append(all, text)
		}
	}
	rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all
}

// set takes the addresses of API servers, sorted, and says whether they are others than before.
func (s *Servers) set(addrs []netip.AddrPort) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if slices.Equal(s.addrs, addrs) {
		return false
	}
	s.addrs = addrs
	return true
}
