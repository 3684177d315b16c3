package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

const (
	serverPort = 8080
	// servers is how many addresses the server has in each family: some lead to each of two routers.
	servers = 16
	// attempts of new flows by a Service follow each other by probeEvery. All give up before the kernel
	// would send a second SYN, which another router could answer.
	probeEvery   = 200 * time.Millisecond
	probeTimeout = 800 * time.Millisecond
	// sweepEvery is for those of a client that is direct. An emulated processor can't do many more.
	sweepEvery = 100 * time.Millisecond
	// stride is from one address to the next: neighbours may well lead to the same router.
	stride = 7
)

// server is the nth address of the server in a family.
func server(f dataplane.Family, n int) netip.Addr {
	if f == dataplane.IPv4 {
		return netip.AddrFrom4([4]byte{192, 0, 2, byte(1 + n)})
	}
	return netip.MustParseAddr(fmt.Sprintf("2001:db8::%x", 1+n))
}

// answer starts a server that tells who came.
func answer() (l net.Listener, err error) {
	ns, err := netlab.Named("server")
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	l, err = ns.Listen(context.Background(), "tcp", fmt.Sprint(":", serverPort))
	if err != nil {
		return nil, err
	}
	go netlab.Serve(l, func(c net.Conn) {
		from, _ := netip.ParseAddrPort(c.RemoteAddr().String())
		_, _ = io.WriteString(c, from.Addr().Unmap().String())
	})
	return l, nil
}

// probe makes a new flow to the nth address of the server and returns the node of the router that it
// came by.
func (v variant) probe(ns *netlab.NS, n int) (string, error) {
	var seen []byte
	err := ns.Do(func() error {
		c, err := net.DialTimeout("tcp", netip.AddrPortFrom(server(v.family, n), serverPort).String(), probeTimeout)
		if err != nil {
			return err
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(probeTimeout)) // of a connection that is open
		seen, err = io.ReadAll(c)
		return err
	})
	if err != nil {
		return "", err
	}
	by, err := netip.ParseAddr(string(seen))
	if err != nil {
		return "", err
	}
	for node, a := range routerEnds {
		if by == a.IPv4 || by == a.IPv6 {
			return node, nil
		}
	}
	return "", fmt.Errorf("the server sees %s, which is no router", by)
}

// try is a new flow to an address of the server.
type try struct {
	to int
	// ended is zero as long as it isn't known whether it passed.
	ended  time.Time
	passed bool
	// silent is one that failed because nothing came back.
	silent bool
}

// begin begins flows to one address of the server after the other, until enough is known of all that
// were begun. A flow passes if it comes by the router of a node.
func (v variant) begin(ctx context.Context, node string, every time.Duration, enough func([]try) (time.Time, bool)) (time.Time, error) {
	ns, err := netlab.Named(v.name)
	if err != nil {
		return time.Time{}, err
	}
	defer ns.Close()
	var mu sync.Mutex // of tries
	var tries []try
	var flows sync.WaitGroup
	defer flows.Wait()
	t := time.NewTicker(every)
	defer t.Stop()
	for i := 0; ; i++ {
		to := i * stride % servers
		mu.Lock()
		at, ok := enough(tries)
		tries = append(tries, try{to: to})
		mu.Unlock()
		if ok {
			return at, nil
		}
		flows.Go(func() {
			by, err := v.probe(ns, to)
			mu.Lock()
			defer mu.Unlock()
			tries[i] = try{to: to, ended: time.Now(), passed: err == nil && by == node, silent: os.IsTimeout(err)}
		})
		select {
		case <-ctx.Done():
			return time.Time{}, fmt.Errorf("%s, %s: not by router %s: %w", v.name, v.family, node, ctx.Err())
		case <-t.C:
		}
	}
}

// recovered returns when the first new flow passed by the router of a node, which is the only one
// that the client's flows go by.
func (v variant) recovered(ctx context.Context, node string) (time.Time, error) {
	return v.begin(ctx, node, probeEvery, firstPassed)
}

// swept returns when all new flows of a client that used several routers pass by that of a node.
func (v variant) swept(ctx context.Context, node string) (time.Time, error) {
	return v.begin(ctx, node, sweepEvery, func(tries []try) (time.Time, bool) {
		at, ok := lastFailed(tries)
		if ok {
			fmt.Fprintf(os.Stderr, "%s, %s: flows each %s %s\n", v.name, v.family, sweepEvery, course(tries))
		}
		return at, ok
	})
}

// course has a sign for each flow: + passed, - failed in silence, ! failed in another way.
func course(tries []try) string {
	var b strings.Builder
	for _, t := range tries {
		switch {
		case t.ended.IsZero():
			b.WriteByte('?')
		case t.passed:
			b.WriteByte('+')
		case t.silent:
			b.WriteByte('-')
		default:
			b.WriteByte('!')
		}
	}
	return b.String()
}

// firstPassed returns when the first flow had passed.
func firstPassed(tries []try) (at time.Time, ok bool) {
	for _, t := range tries {
		if t.passed && (!ok || t.ended.Before(at)) {
			at, ok = t.ended, true
		}
	}
	return at, ok
}

// lastFailed returns, after the last flow that failed, when the first had passed to an address to which one
// had failed, as soon as a flow to each address has passed since.
func lastFailed(tries []try) (time.Time, bool) {
	failed, last := map[int]bool{}, -1
	for i, t := range tries {
		if !t.ended.IsZero() && !t.passed {
			failed[t.to], last = true, i
		}
	}
	since := tries[last+1:]
	if last < 0 || len(since) < servers || slices.ContainsFunc(since[:servers], func(t try) bool { return !t.passed }) {
		return time.Time{}, false
	}
	// One of them is to the address of the last.
	return since[slices.IndexFunc(since, func(t try) bool { return failed[t.to] })].ended, true
}

// spread waits until new flows to all addresses of the server pass, by both routers some.
func (v variant) spread(ctx context.Context) error {
	ns, err := netlab.Named(v.name)
	if err != nil {
		return err
	}
	defer ns.Close()
	for {
		by := map[string]int{}
		var errs []error
		for n := range servers {
			node, err := v.probe(ns, n)
			errs = append(errs, err)
			by[node]++
		}
		err := errors.Join(errs...)
		if err == nil && len(by) == len(routerEnds) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s, %s: flows go by %v: %w", v.name, v.family, by, errors.Join(ctx.Err(), err))
		case <-time.After(probeEvery):
		}
	}
}
