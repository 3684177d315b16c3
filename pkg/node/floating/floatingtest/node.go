package floatingtest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/node/floating/tables"
	"github.com/coil-net/coil/pkg/testkit"
)

// Node is one end of a wire, with a router. Before Listen it hears nothing.
type Node struct {
	*Table
	Name     string
	t        *testing.T
	listener net.Listener

	mu     sync.Mutex
	opens  tables.Open
	accept Accept
	off    bool
	conns  []net.Conn // to this node
}

// Accept takes a connection from a node.
type Accept func(ctx context.Context, from string, conn net.Conn)

func newNode(t *testing.T, name string) *Node {
	return &Node{Table: NewTable(), Name: name, t: t, listener: testkit.Must(net.Listen("tcp", "127.0.0.1:0"))(t)}
}

// Listen accepts connections of the other node until the test ends, and calls finish then.
func (n *Node) Listen(accept Accept, finish func()) {
	ctx, cancel := context.WithCancel(n.t.Context())
	n.AcceptBy(func(Accept) Accept { return accept })
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			conn, err := n.listener.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				defer conn.Close()
				n.mu.Lock()
				accept := n.accept
				n.mu.Unlock()
				accept(ctx, map[string]string{"a": "b", "b": "a"}[n.Name], conn)
			})
		}
	})
	n.t.Cleanup(func() {
		cancel()
		_ = n.listener.Close()
		serving.Wait()
		finish()
	})
}

// AcceptBy changes how later connections are taken.
func (n *Node) AcceptBy(change func(Accept) Accept) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.accept = change(n.accept)
}

// Dial opens a connection to the node.
func (n *Node) Dial(ctx context.Context) (net.Conn, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.off {
		return nil, errors.New("the link is down")
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", n.listener.Addr().String())
	if err == nil {
		n.conns = append(n.conns, conn)
	}
	return conn, err
}

// Cut ends all connections to the node, and lets none be opened, or undoes that.
func (n *Node) Cut(off bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.off = off
	for _, c := range n.conns {
		_ = c.Close()
	}
	n.conns = nil
}

// OpenBy changes how the table of a pod is opened.
func (n *Node) OpenBy(opens tables.Open) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.opens = opens
}

// Open implements tables.Open.
func (n *Node) Open(ctx context.Context, pod types.UID) (tables.Table, error) {
	n.mu.Lock()
	opens := n.opens
	n.mu.Unlock()
	if opens != nil {
		return opens(ctx, pod)
	}
	if !n.Here(pod) {
		return nil, fmt.Errorf("no pod %s", pod)
	}
	return n.Table, nil
}

// Here says whether a pod is the node's router.
func (n *Node) Here(pod types.UID) bool { return pod == types.UID("pod of "+n.Name) }
