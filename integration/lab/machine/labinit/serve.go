package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/integration/lab/machine"
)

// serveControl answers requests until the machine is killed.
func serveControl(l net.Listener, s *supervisor) error {
	for {
		conn, err := l.Accept()
		if err != nil {
			return fmt.Errorf("accept on the control socket: %w", err)
		}
		go func() {
			defer conn.Close()
			var req machine.Request
			if err := json.NewDecoder(conn).Decode(&req); err != nil {
				fmt.Fprintf(os.Stderr, "bad request: %v\n", err)
				return
			}
			if err := json.NewEncoder(conn).Encode(answer(s, req)); err != nil {
				fmt.Fprintf(os.Stderr, "answer %s: %v\n", req.Op, err)
			}
		}()
	}
}

func answer(s *supervisor, req machine.Request) machine.Response {
	var err error
	switch req.Op {
	case machine.OpList:
	case machine.OpStart:
		err = s.start(req.Component)
	case machine.OpKill:
		err = s.kill(req.Component)
	default:
		err = fmt.Errorf("unknown operation")
	}
	r := machine.Response{Components: s.list()}
	if err != nil {
		r.Error = err.Error()
	}
	return r
}

// proxy leads from a socket of the host's network namespace into the machine's, so that no
// interface of the host is needed to reach the machine.
type proxy struct {
	listener net.Listener
	target   string
}

// openProxies takes over the inherited listeners.
func openProxies(targets []string) ([]proxy, error) {
	var all []proxy
	for i, target := range targets {
		fd := machine.FirstListen + i
		unix.CloseOnExec(fd)
		f := os.NewFile(uintptr(fd), target)
		l, err := net.FileListener(f)
		f.Close()
		if err != nil {
			return nil, fmt.Errorf("use the listener for %s: %w", target, err)
		}
		all = append(all, proxy{l, target})
	}
	return all, nil
}

func (p proxy) serve() {
	for {
		conn, err := p.listener.Accept()
		if err != nil {
			fmt.Fprintf(os.Stderr, "accept for %s: %v\n", p.target, err)
			return
		}
		go p.forward(conn)
	}
}

func (p proxy) forward(client net.Conn) {
	defer client.Close()
	server, err := net.Dial("tcp", p.target)
	if err != nil {
		return // the client sees the end of the connection
	}
	defer server.Close()
	var both sync.WaitGroup
	both.Go(func() { pump(server, client) })
	both.Go(func() { pump(client, server) })
	both.Wait()
}

// pump copies one direction and passes its end on; the other direction may go on.
func pump(dst, src net.Conn) {
	if _, err := io.Copy(dst, src); err != nil {
		// The peer has reset the connection: the other direction is of no use either.
		dst.Close()
		src.Close()
		return
	}
	if t, ok := dst.(*net.TCPConn); ok {
		_ = t.CloseWrite() // fails only when the connection is gone
	}
}
