// Package nft makes a table of nftables(8) as it is wanted, in one network namespace.
//
// It owns the whole of the table, of the family inet, ip, ip6 or arp: an object that isn't wanted there goes. Rules change in one
// transaction, so that no packet ever meets half a ruleset. It must not know why a packet is let through,
// nor touch any other table.
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

// definition is a table as it is wanted, in terms of the kernel.
type definition struct {
	counters []string
	sets     []set
	chains   []chain
	shape    []string
}

// state is the table as it is once it is as wanted.
func (d definition) state() *state {
	want := &state{shape: d.shape, sets: map[string]content{}}
	for _, s := range d.sets {
		want.sets[s.Name] = s.wanted()
	}
	return want
}

// chain is a dataplane.Chain whose rules are compiled.
type chain struct {
	dataplane.Chain
	rules []rule
}

// rule has the expressions that the kernel evaluates, and the comment by which the rule is recognised there: the kernel gives
// expressions back in another form, so that the comment ends with their hash.
type rule struct {
	comment string
	exprs   []expr.Any
}

// define compiles a ruleset. It must be called with mu held.
func (t *Table) define(r dataplane.Ruleset) (d definition, err error) {
	compiled := map[dataplane.ChainRule]rule{}
	d.counters = r.Counters
	for _, s := range r.Sets {
		defined, err := t.set(s)
		if err != nil {
			return d, err
		}
		d.sets = append(d.sets, defined)
	}
	for _, c := range r.Chains {
		defined := chain{Chain: c, rules: make([]rule, 0, len(c.Rules))}
		for _, text := range c.Rules {
			r, ok := t.compiled[text]
			if !ok {
				if r, err = newRule(text); err != nil {
					return d, fmt.Errorf("chain %s: %w", c.Name, err)
				}
			}
			compiled[text] = r
			defined.rules = append(defined.rules, r)
		}
		d.chains = append(d.chains, defined)
	}
	t.compiled, d.shape = compiled, d.shapes()
	return d, nil
}

func newRule(text dataplane.ChainRule) (rule, error) {
	exprs, err := compile(text.Text)
	if err != nil {
		return rule{}, err
	}
	sum := sha256.New()
	for _, e := range exprs {
		data, err := expr.Marshal(byte(nftables.TableFamilyINet), e) // which changes none of those that are used
		if err != nil {
			return rule{}, fmt.Errorf("rule %q: %w", text.Text, err)
		}
		sum.Write(data)
	}
	return rule{text.Comment + " " + hex.EncodeToString(sum.Sum(nil)[:4]), exprs}, nil
}

// writeBuffer holds the largest transaction, in bytes: a ruleset with some 10,000 clients.
const writeBuffer = 16 << 20

// mostPrepared is after how many ranges of new sets a transaction ends; a range is up to 100 bytes of it.
const mostPrepared = 16384

// Table is a table in a network namespace. It is safe for concurrent use.
type Table struct {
	name   string
	family nftables.TableFamily
	fd     int
	handle *rtnl.Handle
	// most is how many elements may be read; 0 any number, where no program of a pod makes any.
	most int

	mu sync.Mutex // is held from reading to writing
	// compiled has the rules of the last ruleset, most of which are in the next one, too.
	compiled map[dataplane.ChainRule]rule
	// made says that the table was as it was wanted when the rulesets had the generation: as long as they have it, nobody has changed anything. known is the state that it
	// had, so that it needn't be read; nil if that isn't known.
	made       bool
	known      *state
	generation uint32
	// commits counts the transactions of a change.
	commits uint32
	// defined are the sets that were synced, by name and without elements.
	defined map[string]set
}

// state is the content of a table.
type state struct {
	shape []string
	sets  map[string]content
}

// New returns the table of a namespace, nil for the one that the process was started in, with rules for both families of addresses. The
// namespace must stay open as long as the Table is used.
func New(ns *netns.NS, name string) (*Table, error) {
	return newTable(ns, name, nftables.TableFamilyINet)
}

// NewIP is like New, with rules for one family.
func NewIP(ns *netns.NS, name string, f dataplane.Family) (*Table, error) {
	if f == dataplane.IPv4 {
		return newTable(ns, name, nftables.TableFamilyIPv4)
	}
	return newTable(ns, name, nftables.TableFamilyIPv6)
}

// String names the table as nft(8) does, by its family and its name.
func (t *Table) String() string {
	if t.family == nftables.TableFamilyARP {
		return "arp " + t.name
	}
	return familyNames[t.family] + " " + t.name
}

// NewARP is like New, for a table whose rules meet ARP.
func NewARP(ns *netns.NS, name string) (*Table, error) {
	return newTable(ns, name, nftables.TableFamilyARP)
}

func newTable(ns *netns.NS, name string, family nftables.TableFamily) (*Table, error) {
	h, err := rtnl.NewProtocol(ns, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("open nftables: %w", err)
	}
	t := &Table{name: name, family: family, handle: h}
	if ns != nil {
		t.fd = ns.Fd()
	}
	return t, nil
}

// NewOfPod returns the table of a namespace in which programs of a pod may have made as many objects as they like.
// Too many are an error, rtnl.ErrTooMany.
func NewOfPod(ns *netns.NS, name string) (*Table, error) {
	t, err := New(ns, name)
	if err != nil {
		return nil, err
	}
	t.most = maxElementsOfPod
	t.handle.Bound(maxMessagesOfPod)
	return t, nil
}

// Close closes the table, which stays as it is. No call may be in progress.
func (t *Table) Close() { t.handle.Close() }

// connect returns a connection, on which requests are collected until they are flushed.
func (t *Table) connect() (*nftables.Conn, error) {
	options := []nftables.ConnOption{nftables.WithSockOptions(func(c *netlink.Conn) error {
		return errors.Join(c.SetWriteBuffer(writeBuffer), c.SetReadBuffer(writeBuffer))
	})}
	if t.fd != 0 {
		options = append(options, nftables.WithNetNSFd(t.fd))
	}
	return nftables.New(options...)
}

// named is the table in requests.
func (t *Table) named() *nftables.Table {
	return &nftables.Table{Name: t.name, Family: t.family}
}

// Sync makes the table what a ruleset says, and counts what it changed. If chains and rules are as they should
// be, only elements of sets are added and removed; otherwise all rules are made anew. Counters go on counting.
func (t *Table) Sync(ctx context.Context, r dataplane.Ruleset) (dataplane.Result, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	result, err := t.sync(ctx, r)
	if err != nil {
		return dataplane.Result{}, fmt.Errorf("table %s of nftables: %w", t.name, err)
	}
	return result, nil
}

func (t *Table) sync(ctx context.Context, r dataplane.Ruleset) (result dataplane.Result, err error) {
	if len(r.Chains) == 0 {
		return t.remove(ctx)
	}
	d, err := t.define(r)
	if err != nil {
		return result, err
	}
	have, before, err := t.current(ctx, d)
	if err != nil {
		return result, fmt.Errorf("read: %w", err)
	}
	conn, err := t.connect()
	if err != nil {
		return result, err
	}
	t.made, t.known, t.commits = false, nil, 0
	if result, err = t.write(ctx, conn, d, have); err != nil {
		return result, err
	}
	// If the state can't be known now, it is read the next time.
	if after, err := t.currentGeneration(ctx); err == nil && after == before+t.commits {
		t.made, t.known, t.generation = true, d.state(), after
	}
	t.defined = map[string]set{}
	for _, s := range d.sets {
		s.Elements, s.Ranges = nil, nil
		t.defined[s.Name] = s
	}
	return result, nil
}

// current returns the state of the table, and the generation that the rulesets had before it was read.
// A state that is known isn't read again.
func (t *Table) current(ctx context.Context, d definition) (*state, uint32, error) {
	generation, err := t.currentGeneration(ctx)
	if err != nil || t.known != nil && t.generation == generation {
		return t.known, generation, err
	}
	have, err := t.read(ctx, d)
	return have, generation, err
}

// read returns the state of the table, with the elements of those sets that can stay.
func (t *Table) read(ctx context.Context, d definition) (*state, error) {
	have := &state{sets: map[string]content{}}
	var err error
	if have.shape, err = t.shape(ctx); err != nil {
		return nil, err
	}
	count := 0
	for _, s := range d.sets {
		if s.byRules() || !slices.Contains(have.shape, s.shape()) {
			continue
		}
		elements, err := t.readElements(ctx, s.Name)
		if err != nil {
			return nil, err
		}
		have.sets[s.Name] = contentOf(s.Interval, elements)
		if count += len(elements); t.most > 0 && count > t.most {
			return nil, fmt.Errorf("%w: more than %d elements", rtnl.ErrTooMany, t.most)
		}
	}
	return have, nil
}

// commit sends the requests that were collected, as one transaction.
func (t *Table) commit(conn *nftables.Conn) error {
	t.commits++
	return conn.Flush()
}

// write makes the table, whose state it is told, as it is defined.
func (t *Table) write(ctx context.Context, conn *nftables.Conn, d definition, have *state) (dataplane.Result, error) {
	var result dataplane.Result
	if !slices.Equal(d.shape, have.shape) {
		if err := t.replace(ctx, conn, d, have); err != nil {
			return result, fmt.Errorf("replace: %w", err)
		}
		if len(have.shape) > 0 {
			return dataplane.Result{Replaced: 1}, nil
		}
		return dataplane.Result{Added: 1}, nil
	}
	for _, s := range d.sets {
		add, remove := s.difference(have.sets[s.Name])
		if err := errors.Join(s.collect(conn.SetDeleteElements, s.nft(0), remove), s.collect(conn.SetAddElements, s.nft(0), add)); err != nil {
			return dataplane.Result{}, err
		}
		result = result.Plus(dataplane.Result{Added: add.size(), Deleted: remove.size()})
	}
	if !result.Changed() {
		return result, nil
	}
	if err := t.commit(conn); err != nil {
		return dataplane.Result{}, fmt.Errorf("change: %w", err)
	}
	return result, nil
}

// remove removes the table; none is no error. It must be called with mu held.
func (t *Table) remove(ctx context.Context) (result dataplane.Result, err error) {
	t.made, t.known, t.defined = false, nil, nil
	// A transaction waits for all processors, also if it changes nothing.
	if exists, err := t.Exists(ctx); err != nil || !exists {
		return result, err
	}
	conn, err := t.connect()
	if err != nil {
		return result, err
	}
	// To add it first makes the deletion of a table that has gone meanwhile no error.
	conn.DelTable(conn.AddTable(t.named()))
	if err := conn.Flush(); err != nil {
		return result, fmt.Errorf("remove: %w", err)
	}
	return dataplane.Result{Deleted: 1}, nil
}

// Exists says whether there is the table.
func (t *Table) Exists(ctx context.Context) (bool, error) {
	_, exists, err := t.readFlags(ctx)
	return exists, err
}

// replace makes all rules anew, in one transaction with all else that isn't as it is defined.
//
// No packet gets past the rules meanwhile. A chain that is hooked already stays, since the kernel
// hooks a new one before it has its rules, and unhooks an old one after it has lost them. The elements of a
// new set of intervals may be found only some time after the transaction that made it: it is made
// before its rules, and the old set goes with the old rules.
func (t *Table) replace(ctx context.Context, conn *nftables.Conn, d definition, have *state) error {
	prepared, err := t.prepare(conn, d, have)
	if err != nil {
		return err
	}
	n := t.named()
	conn.AddTable(n)
	stays := map[string]bool{}
	if len(have.shape) > 0 {
		if stays, err = t.clear(ctx, conn, d, have); err != nil {
			return err
		}
	}
	for _, name := range d.counters {
		if !stays[counterShape(name)] {
			conn.AddObj(&nftables.CounterObj{Table: n, Name: name})
		}
	}
	// Elements of verdict maps refer to chains, and rules to both.
	for _, c := range d.chains {
		if nc := c.nft(n); !stays[chainShape(nc)] {
			conn.AddChain(nc)
		}
	}
	for i, s := range d.sets {
		switch {
		case prepared[s.Name]:
		case stays[s.shape()]:
			add, _ := s.difference(have.sets[s.Name])
			err = s.collect(conn.SetAddElements, s.nft(0), add)
		default:
			err = s.add(conn, uint32(i+1))
		}
		if err != nil {
			return err
		}
	}
	for _, c := range d.chains {
		for _, r := range c.rules {
			conn.AddRule(&nftables.Rule{
				Table: n, Chain: c.nft(n), Exprs: r.exprs, UserData: userdata.AppendString(nil, userdata.TypeComment, r.comment),
			})
		}
	}
	return t.commit(conn)
}

// clear collects requests that remove all objects that aren't as defined, and returns the shapes of those that stay. Rules go first,
// since they refer to all the others, and chains after the elements of verdict maps that refer to them.
func (t *Table) clear(ctx context.Context, conn *nftables.Conn, d definition, have *state) (map[string]bool, error) {
	o, err := t.readObjects(ctx)
	if err != nil {
		return nil, err
	}
	stays := map[string]bool{}
	keep := func(item string) bool {
		stays[item] = slices.Contains(d.shape, item)
		return stays[item]
	}
	for _, c := range o.chains {
		conn.FlushChain(c)
	}
	for _, s := range o.sets {
		if !s.Anonymous && !keep(setShape(s)) {
			conn.DelSet(s)
		}
	}
	for _, s := range d.sets {
		if stays[s.shape()] {
			_, remove := s.difference(have.sets[s.Name])
			if err := s.collect(conn.SetDeleteElements, s.nft(0), remove); err != nil {
				return nil, err
			}
		}
	}
	for _, c := range o.chains {
		if !keep(chainShape(c)) {
			conn.DelChain(c)
		}
	}
	for _, o := range o.named {
		if !keep(o.shape()) {
			conn.DeleteObject(&nftables.NamedObj{Table: t.named(), Name: o.Name, Type: o.kind})
		}
	}
	return stays, nil
}

// prepare makes the sets of intervals that there aren't, maps aside, and returns their names. A transaction has few of them:
// the kernel takes no message of more than 32 MiB.
func (t *Table) prepare(conn *nftables.Conn, d definition, have *state) (map[string]bool, error) {
	made := map[string]bool{}
	collected := 0 // ranges
	for i, s := range d.sets {
		if !s.Interval || s.Value != "" || slices.Contains(have.shape, s.shape()) {
			continue
		}
		if collected == 0 {
			conn.AddTable(t.named())
		}
		if err := s.add(conn, uint32(i+1)); err != nil {
			return nil, err
		}
		made[s.Name] = true
		if collected += 1 + len(s.Ranges) + len(s.Elements); collected >= mostPrepared {
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

// hooks are those of linux/netfilter.h and linux/netfilter_arp.h by their names.
var hooks = map[string]*nftables.ChainHook{
	"prerouting": nftables.ChainHookPrerouting, "input": nftables.ChainHookInput, "forward": nftables.ChainHookForward,
	"output": nftables.ChainHookOutput, "postrouting": nftables.ChainHookPostrouting,
	"arp input": nftables.ChainHookRef(0),
}

// nft is the chain in requests.
func (c chain) nft(table *nftables.Table) *nftables.Chain {
	nc := &nftables.Chain{Table: table, Name: c.Name}
	if c.Hook != nil {
		nc.Type, nc.Hooknum, nc.Policy = nftables.ChainType(c.Hook.Type), hooks[c.Hook.Name], new(nftables.ChainPolicyAccept)
		nc.Priority = nftables.ChainPriorityRef(nftables.ChainPriority(c.Hook.Priority))
	}
	return nc
}
