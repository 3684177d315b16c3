package handover

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/node/floating/floatingtest"
	"github.com/coil-net/coil/pkg/testkit"
)

// lab is a world whose routers have tables of the kernel, with the times of every day.
type lab struct {
	*floatingtest.Lab
	a, b *fakeNode
}

func newLab(t *testing.T) *lab {
	w := newWorld(t)
	w.a.limits, w.b.limits = defaults, defaults
	return &lab{floatingtest.NewLab(w.World), w.a, w.b}
}

// Thousands of connections go on while their address moves, first the place and then the client: none is reset, and none has another source.
func TestConnectionsLiveOn(t *testing.T) {
	testkit.Need(t, testkit.Netns)
	l := newLab(t)
	v := l.Opens(2500, 7)
	l.Lives(v, "at the first router")
	a := l.Address("p-0", "a")

	moved, move := context.WithCancel(t.Context())
	began := time.Now()
	l.a.Move(moved, a, "b")
	t.Logf("%d connections were copied in %s", v.Len(), time.Since(began))
	l.PlaceAt(3)
	l.Change("p-0", func(f *v2.Floating) { f.Holding.Holder, f.Holding.PodUID, f.MovingTo = "b", "pod of b", "" })
	move()
	l.Lives(v, "while the client sends to the first router, and the second one has the address")
	l.ClientTo(3)
	l.Lives(v, "at the second router")
	l.Lives(v, "later")
	l.Quiet(v)
	l.a.counted(t, sent, done, 1)
	l.b.counted(t, received, done, 1)
}

// Connections that aren't copied end, by a reset of nobody but their own ends, and have no other source.
func TestConnectionsThatAreNotCopied(t *testing.T) {
	testkit.Need(t, testkit.Netns)
	l := newLab(t)
	v := l.Opens(20, 7)
	l.Lives(v, "at the first router")
	l.a.cfg.Dial = func(context.Context, string) (net.Conn, error) { return nil, errors.New("no way") }
	l.a.Move(t.Context(), l.Address("p-0", "a"), "b")
	l.a.counted(t, sent, failed, 1)
	l.PlaceAt(3)
	l.ClientTo(3)
	testkit.Check(t, v.Write())
	// New ones are opened as ever: what came before them has arrived, or was dropped.
	c := testkit.Must(l.Client.Lab().Dial(t.Context(), "tcp", "192.0.2.1:7"))(t)
	defer c.Close()
	testkit.Must(c.Write([]byte{'a'}))(t)
	testkit.Must(io.ReadFull(c, make([]byte, 1)))(t)
	if got := l.Counter(l.Server, "others"); got != "packets 0" {
		t.Errorf("the server has seen other sources: %s", got)
	}
}

// The time that an address waits for 50,000 connections.
func TestManyConnections(t *testing.T) {
	testkit.Need(t, testkit.Netns)
	l := newLab(t)
	a := l.Address("p-0", "a")
	const n = 50000
	var flows []conntrack.Flow
	for i := range n {
		f := floatingtest.Flow(a, i)
		f.Protocol, f.TCP, f.Timeout = unix.IPPROTO_UDP, conntrack.TCP{}, 3600
		flows = append(flows, f)
	}
	ta, tb := testkit.Must(conntrack.New(l.RA.NS))(t), testkit.Must(conntrack.New(l.RB.NS))(t)
	t.Cleanup(ta.Close)
	t.Cleanup(tb.Close)
	if got, err := ta.Insert(t.Context(), flows); got != n || err != nil {
		t.Fatalf("%d are inserted, %v", got, err)
	}
	began := time.Now()
	l.a.Move(t.Context(), a, "b")
	took := time.Since(began)
	t.Logf("%d connections are copied in %s", n, took)
	count := 0
	testkit.Check(t, tb.Translated(t.Context(), a.Addrs(), func(f conntrack.Flow) {
		if f.Protocol == unix.IPPROTO_UDP { // and no ping
			count++
		}
	}))
	if count != n {
		t.Errorf("%d connections are copied, want %d", count, n)
	}
}
