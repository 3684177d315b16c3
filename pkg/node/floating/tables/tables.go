// Package tables has the connections that routers of this node track: it reads them by their floating addresses, and changes them.
//
// It owns how often a table is read, and for how long it is open. It must not know why connections are copied.
package tables

import (
	"context"
	"net/netip"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/kernel/conntrack"
)

// Longest is the longest time of a flow that is taken from another node, in seconds: the kernel's own for TCP.
const Longest = 5 * 24 * 3600

// total is how long a table is open at most.
const total = 10 * time.Second

// Table is the table of flows of a router; see conntrack.Table.
type Table interface {
	Translated(ctx context.Context, addrs []netip.Addr, each func(conntrack.Flow)) error
	Insert(ctx context.Context, flows []conntrack.Flow) (int, error)
	Update(ctx context.Context, flows []conntrack.Flow) (int, error)
	Delete(ctx context.Context, flows []conntrack.Flow) (int, error)
	Forget(ctx context.Context, addrs ...netip.Addr) (int, error)
	// Size returns how many flows are tracked, and how many may be.
	Size() (count, limit int, err error)
	Close()
}

// Open opens the table of a pod of this node.
type Open func(ctx context.Context, pod types.UID) (Table, error)

// Tables are those of the pods of this node. Its methods may be called concurrently.
type Tables struct {
	open Open
	life context.Context // without an end
	// dumps reads flows, and clears forgets them.
	dumps, clears shared
}

// New returns the Tables that open opens.
func New(ctx context.Context, open Open) *Tables {
	t := &Tables{open: open, life: context.WithoutCancel(ctx)}
	t.dumps = shared{do: t.dump, next: map[types.UID]*call{}}
	t.clears = shared{do: t.clear, next: map[types.UID]*call{}}
	return t
}

// Open opens the table of a pod. It keeps the pod's network alive until it is closed.
func (t *Tables) Open(ctx context.Context, pod types.UID) (Table, error) { return t.open(ctx, pod) }

// With does something with the table of a pod, which isn't open for longer.
func (t *Tables) With(pod types.UID, do func(context.Context, Table) error) error {
	ctx, cancel := context.WithTimeout(t.life, total)
	defer cancel()
	table, err := t.open(ctx, pod)
	if err != nil {
		return err
	}
	defer table.Close()
	return do(ctx, table)
}

// Read reads the flows of addresses at a pod, and maybe others.
func (t *Tables) Read(ctx context.Context, pod types.UID, addrs []netip.Addr) (Found, error) {
	return t.dumps.call(ctx, pod, addrs)
}

// Forget forgets the flows of addresses at a pod.
func (t *Tables) Forget(ctx context.Context, pod types.UID, addrs []netip.Addr) error {
	_, err := t.clears.call(ctx, pod, addrs)
	return err
}

func (t *Tables) dump(pod types.UID, addrs []netip.Addr) (Found, error) {
	all := Found{}
	return all, t.With(pod, func(ctx context.Context, table Table) error {
		return table.Translated(ctx, addrs, func(f conntrack.Flow) {
			a := f.Translated.Addr()
			all[a] = append(all[a], f)
		})
	})
}

func (t *Tables) clear(pod types.UID, addrs []netip.Addr) (Found, error) {
	return nil, t.With(pod, func(ctx context.Context, table Table) error {
		_, err := table.Forget(ctx, addrs...)
		return err
	})
}

// Put gives flows to a table, and returns how many are new to it. The others live as long as these.
func Put(ctx context.Context, table Table, flows []conntrack.Flow) (int, error) {
	n, err := table.Insert(ctx, flows)
	if err == nil && n < len(flows) {
		_, err = table.Update(ctx, flows)
	}
	return n, err
}

// Key tells flows of an address apart.
type Key struct {
	Protocol byte
	Src, Dst netip.AddrPort
}

// KeyOf returns the Key of a flow.
func KeyOf(f conntrack.Flow) Key { return Key{f.Protocol, f.Src, f.Dst} }
