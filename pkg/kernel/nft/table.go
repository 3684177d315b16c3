// Package nft makes Coil's table of nftables(8) as it is wanted, in one network namespace.
//
// It owns the table "coil" of the family inet, all of it: what isn't wanted there goes.
// Rules change in one transaction, so that no packet ever meets half a ruleset. It must not know
// why a packet is let through, nor touch any other table.
package nft

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// family is that of the table: rules for both families of addresses.
const family = nftables.TableFamilyINet

// definition is a table as it is wanted.
type definition struct {
	counters []string
	sets     []set
	chains   []chain
}

// chain is a base chain, which accepts what no rule drops; or, without a hook, one that rules
// lead to.
type chain struct {
	name     string
	kind     nftables.ChainType
	hook     *nftables.ChainHook
	priority *nftables.ChainPriority
	rules    []rule
}

// rule is expressions, and what they are for.
type rule struct {
	comment string
	exprs   []expr.Any
}

// mark is what a rule in the kernel is recognised by: its comment, and a hash of its
// expressions, which the kernel gives back in another form.
func (r rule) mark() (string, error) {
	sum := sha256.New()
	for _, e := range r.exprs {
		data, err := expr.Marshal(byte(family), e)
		if err != nil {
			return "", fmt.Errorf("rule %q: %w", r.comment, err)
		}
		sum.Write(data)
	}
	return r.comment + " " + hex.EncodeToString(sum.Sum(nil)[:4]), nil
}

// writeBuffer holds the largest transaction, in bytes: a ruleset with some 10,000 clients.
const writeBuffer = 16 << 20

// mostPrepared is after how many ranges of new sets a transaction ends; a range is up to 100 bytes of it.
const mostPrepared = 16384

// table is Coil's table in a network namespace. It is safe for concurrent use.
type table struct {
	fd     int
	handle *rtnl.Handle
	// most is how many elements may be read; 0 any number, where no program of a pod makes any.
	most int

	mu sync.Mutex // is held from reading to writing
	// known is what the table was when the rulesets had the generation: as long as they
	// have it, nobody has changed anything, and nothing needs to be read.
	known      *state
	generation uint32
	// commits counts the transactions of a change.
	commits uint32
}

// state is what a table is.
type state struct {
	shape []string
	sets  map[string]content
}

// open returns the table of a namespace, nil for the one that the process was started in.
func open(ns *netns.NS) (*table, error) {
	h, err := rtnl.NewProtocol(ns, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("open nftables: %w", err)
	}
	t := &table{handle: h}
	if ns != nil {
		t.fd = ns.Fd()
	}
	return t, nil
}

// Close closes the table, which stays as it is. No call may be in progress.
func (t *table) Close() { t.handle.Close() }

// connect returns a connection, on which requests are collected until they are flushed.
func (t *table) connect() (*nftables.Conn, error) {
	options := []nftables.ConnOption{nftables.WithSockOptions(func(c *netlink.Conn) error {
		return errors.Join(c.SetWriteBuffer(writeBuffer), c.SetReadBuffer(writeBuffer))
	})}
	if t.fd != 0 {
		options = append(options, nftables.WithNetNSFd(t.fd))
	}
	return nftables.New(options...)
}

// named is the table in requests.
func named() *nftables.Table {
	return &nftables.Table{Name: dataplane.NftTable, Family: family}
}

// sync makes the table as it is defined. If its chains and rules are, only elements of sets are added
// and deleted; otherwise all rules are made anew.
func (t *table) sync(ctx context.Context, d definition) (dataplane.Result, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	result, err := t.change(ctx, d)
	if err != nil {
		return dataplane.Result{}, fmt.Errorf("table %s of nftables: %w", dataplane.NftTable, err)
	}
	return result, nil
}

func (t *table) change(ctx context.Context, d definition) (dataplane.Result, error) {
	var result dataplane.Result
	shape, err := d.shape()
	if err != nil {
		return result, err
	}
	want := &state{shape: shape, sets: map[string]content{}}
	for _, s := range d.sets {
		want.sets[s.name] = s.wanted()
	}
	conn, err := t.connect()
	if err != nil {
		return result, err
	}
	have, before, err := t.current(ctx, conn, d, shape)
	if err != nil {
		return result, fmt.Errorf("read: %w", err)
	}
	t.known, t.commits = nil, 0
	if result, err = t.write(ctx, conn, d, shape, have); err != nil {
		return dataplane.Result{}, err
	}
	// What can't be known now is read the next time.
	if after, err := t.currentGeneration(ctx); err == nil && after == before+t.commits {
		t.known, t.generation = want, after
	}
	return result, nil
}

// current returns what the table is, and the generation that the rulesets had before it was read.
// What is known isn't read again.
func (t *table) current(ctx context.Context, conn *nftables.Conn, d definition, shape []string) (*state, uint32, error) {
	generation, err := t.currentGeneration(ctx)
	if err != nil || t.known != nil && t.generation == generation {
		return t.known, generation, err
	}
	have, err := t.read(ctx, conn, d, shape)
	return have, generation, err
}

// read returns what the table is, with the elements of those sets that can stay.
func (t *table) read(ctx context.Context, conn *nftables.Conn, d definition, shape []string) (*state, error) {
	have := &state{sets: map[string]content{}}
	var err error
	if have.shape, err = t.shape(ctx, conn); err != nil {
		return nil, err
	}
	count := 0
	for _, s := range d.sets {
		if s.byRules() || !slices.Contains(have.shape, s.shape()) {
			continue
		}
		elements, err := t.readElements(ctx, s.name)
		if err != nil {
			return nil, err
		}
		have.sets[s.name] = s.holds(elements)
		if count += len(elements); t.most > 0 && count > t.most {
			return nil, fmt.Errorf("%w: more than %d elements", rtnl.ErrTooMany, t.most)
		}
	}
	return have, nil
}

// commit makes what was collected, in one transaction.
func (t *table) commit(conn *nftables.Conn) error {
	t.commits++
	return conn.Flush()
}

// write makes of what the table is what is defined.
func (t *table) write(ctx context.Context, conn *nftables.Conn, d definition, shape []string, have *state) (dataplane.Result, error) {
	var result dataplane.Result
	if !slices.Equal(shape, have.shape) {
		if err := t.replace(ctx, conn, d, shape, have); err != nil {
			return result, fmt.Errorf("replace: %w", err)
		}
		if len(have.shape) > 0 {
			return dataplane.Result{Replaced: 1}, nil
		}
		return dataplane.Result{Added: 1}, nil
	}
	for _, s := range d.sets {
		r, err := s.update(conn, have.sets[s.name])
		if err != nil {
			return result, fmt.Errorf("set %s: %w", s.name, err)
		}
		result = result.Plus(r)
	}
	if !result.Changed() {
		return result, nil
	}
	if err := t.commit(conn); err != nil {
		return dataplane.Result{}, fmt.Errorf("change: %w", err)
	}
	return result, nil
}

// remove removes the table; none is no error.
func (t *table) remove() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	conn, err := t.connect()
	if err != nil {
		return err
	}
	// A transaction waits for all processors, also if it changes nothing.
	if _, err := conn.ListTableOfFamily(dataplane.NftTable, family); errors.Is(err, unix.ENOENT) {
		return nil
	}
	// To add it first makes the deletion of a table that has gone meanwhile no error.
	conn.DelTable(conn.AddTable(named()))
	if err := conn.Flush(); err != nil {
		return fmt.Errorf("remove table %s of nftables: %w", dataplane.NftTable, err)
	}
	return nil
}

// replace makes all rules anew, in one transaction with all else that isn't as it is defined.
//
// No packet gets past the rules meanwhile. A chain that is hooked already stays, since the kernel
// hooks a new one before it has its rules, and unhooks an old one after it has lost them. What is in a
// new set of intervals may be found only some time after the transaction that made it: it is made
// before its rules, and the old set goes with the old rules.
func (t *table) replace(ctx context.Context, conn *nftables.Conn, d definition, shape []string, have *state) error {
	prepared, err := t.prepare(conn, d, have)
	if err != nil {
		return err
	}
	n := named()
	conn.AddTable(n)
	stays := map[string]bool{}
	if len(have.shape) > 0 {
		o, err := t.readObjects(ctx)
		if err != nil {
			return err
		}
		// Rules go first: they refer to all the others.
		for _, c := range o.chains {
			conn.FlushChain(c)
		}
		keep := func(item string) bool {
			stays[item] = slices.Contains(shape, item)
			return stays[item]
		}
		for _, c := range o.chains {
			if !keep(chainShape(c)) {
				conn.DelChain(c)
			}
		}
		for _, s := range o.sets {
			if !s.Anonymous && !keep(setShape(s)) {
				conn.DelSet(s)
			}
		}
		for _, o := range o.named {
			if !keep(o.shape()) {
				conn.DeleteObject(&nftables.NamedObj{Table: n, Name: o.name, Type: o.kind})
			}
		}
	}
	for _, name := range d.counters {
		if !stays[counterShape(name)] {
			conn.AddObj(&nftables.CounterObj{Table: n, Name: name})
		}
	}
	for i, s := range d.sets {
		switch {
		case prepared[s.name]:
		case stays[s.shape()]:
			_, err = s.update(conn, have.sets[s.name])
		default:
			err = s.add(conn, uint32(i+1))
		}
		if err != nil {
			return err
		}
	}
	for _, c := range d.chains {
		nc := c.nft()
		if !stays[chainShape(nc)] {
			conn.AddChain(nc)
		}
		for _, r := range c.rules {
			mark, err := r.mark()
			if err != nil {
				return err
			}
			conn.AddRule(&nftables.Rule{
				Table: n, Chain: nc, Exprs: r.exprs, UserData: userdata.AppendString(nil, userdata.TypeComment, mark),
			})
		}
	}
	return t.commit(conn)
}

// prepare makes the sets of intervals that there aren't, and returns their names. A transaction has few of them:
// the kernel takes no message of more than 32 MiB.
func (t *table) prepare(conn *nftables.Conn, d definition, have *state) (map[string]bool, error) {
	made := map[string]bool{}
	collected := 0 // ranges
	for i, s := range d.sets {
		if !s.interval || slices.Contains(have.shape, s.shape()) {
			continue
		}
		if collected == 0 {
			conn.AddTable(named())
		}
		if err := s.add(conn, uint32(i+1)); err != nil {
			return nil, err
		}
		made[s.name] = true
		if collected += 1 + len(s.ranges); collected >= mostPrepared {
			if err := t.commit(conn); err != nil {
				return nil, err
			}
			collected = 0
		}
	}
	if collected == 0 {
		return made, nil
	}
	return made, t.commit(conn)
}

// nft is the chain in requests.
func (c chain) nft() *nftables.Chain {
	nc := &nftables.Chain{Table: named(), Name: c.name}
	if c.hook != nil {
		policy := nftables.ChainPolicyAccept
		nc.Type, nc.Hooknum, nc.Priority, nc.Policy = c.kind, c.hook, c.priority, &policy
	}
	return nc
}
