package standby

import (
	"cmp"
	"context"
	"errors"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/node/floating/frames"
	"github.com/coil-net/coil/pkg/node/floating/tables"
)

// mostStarting is of how many addresses all flows are sent in one turn: the other node reads them, and answers in time.
const mostStarting = 16

// stream copies the flows of some addresses to one node.
type stream struct {
	s      *Standby
	node   string
	cancel context.CancelFunc
	wake   chan struct{}

	mu  sync.Mutex
	all map[string]*copied // by block
	// young are flows that are to be sent after the next turn, due are those to be sent with it, and over are flows that have ended.
	young, due, over map[tables.Key]conntrack.Flow
	// dumped says that flows among those that are young, and due, may have been sent already, with all of their address.
	dumped [2]bool
	// oldest are the times of the first event among those that are young, due and being sent.
	oldest [3]time.Time
}

// copied is an address whose flows are copied.
type copied struct {
	lead
	// watched says that changes are heard. has says that the other node has had all flows since then.
	watched, has bool
	// whole is when they were sent last, and again when they may be sent again at the earliest: pause later, which is longer each time that they have to
	// be.
	whole, again time.Time
	pause        time.Duration
	// since is since when the other node has lacked flows; zero if it has all. why says why.
	since time.Time
	why   string
}

func (s *Standby) newStream(node string) *stream {
	ctx, cancel := context.WithCancel(s.life)
	st := &stream{
		s: s, node: node, cancel: cancel, wake: make(chan struct{}, 1), all: map[string]*copied{},
		young: map[tables.Key]conntrack.Flow{}, due: map[tables.Key]conntrack.Flow{}, over: map[tables.Key]conntrack.Flow{},
	}
	s.streams[node] = st
	s.group.Go(func() { st.run(ctx) })
	return st
}

func (st *stream) awake() {
	select {
	case st.wake <- struct{}{}:
	default:
	}
}

// add begins to copy the flows of an address.
func (st *stream) add(l lead, watched bool) {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.all[l.Block] = &copied{lead: l, watched: watched, since: time.Now(), why: "the first copy isn't complete yet"}
	st.awake()
}

// drop ends the copying of an address, and says whether there is no address left.
func (st *stream) drop(block string) bool {
	st.mu.Lock()
	defer st.mu.Unlock()
	delete(st.all, block)
	return len(st.all) == 0
}

// lacks notes that the other node lacks flows of an address.
func (c *copied) lacks(why string) {
	if c.has, c.why = false, why; c.since.IsZero() {
		c.since = time.Now()
	}
}

// watched says that changes of a pod's flows are heard from now on, or aren't.
func (st *stream) watched(pod types.UID, watched bool) {
	defer st.told()
	st.mu.Lock()
	defer st.mu.Unlock()
	for _, c := range st.all {
		if c.Pod == pod {
			c.watched = watched
			c.lacks("changes of connections were lost")
		}
	}
	st.awake()
}

// restart lets all flows be sent anew.
func (st *stream) restart(why string) {
	defer st.told()
	st.mu.Lock()
	defer st.mu.Unlock()
	for _, c := range st.all {
		c.lacks(why)
	}
	clear(st.young)
	clear(st.due)
	clear(st.over)
	st.oldest = [3]time.Time{}
}

// again lets all flows of an address be sent anew.
func (st *stream) again(block string) {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.all[block].lacks("connections have come with the address")
	st.awake()
}

// push takes an event. It doesn't wait for the other node.
func (st *stream) push(e conntrack.Event) {
	st.mu.Lock()
	if st.oldest[0].IsZero() {
		st.oldest[0] = time.Now()
		st.awake()
	}
	id := tables.KeyOf(e.Flow)
	_, young := st.young[id]
	_, due := st.due[id]
	switch {
	case !e.Over:
		st.young[id] = e.Flow
	default:
		delete(st.young, id)
		delete(st.due, id)
		if sent := !young && !due || young && st.dumped[0] || due && st.dumped[1]; sent {
			st.over[id] = e.Flow
		}
	}
	full := len(st.young)+len(st.due)+len(st.over) > st.s.limits.waiting
	st.mu.Unlock()
	if full {
		st.s.metrics.restarts.WithLabelValues("overflow").Inc()
		st.restart("more connections began and ended than the other node has taken")
	}
}

// turn returns the flows that are to be sent now.
func (st *stream) turn() (over, begun map[tables.Key]conntrack.Flow) {
	st.mu.Lock()
	defer st.mu.Unlock()
	over, begun = st.over, st.due
	st.over, st.due, st.young = map[tables.Key]conntrack.Flow{}, st.young, map[tables.Key]conntrack.Flow{}
	st.oldest = [3]time.Time{{}, st.oldest[0], st.oldest[1]}
	st.dumped = [2]bool{false, st.dumped[0]}
	return over, begun
}

// state returns since when the other node lacks flows of an address.
func (st *stream) state(block string) (since time.Time, why string) {
	st.mu.Lock()
	defer st.mu.Unlock()
	c := st.all[block]
	if !c.since.IsZero() {
		return c.since, c.why
	}
	if oldest := st.first(); time.Since(oldest) > st.s.limits.turn*10 && !oldest.IsZero() {
		return oldest, "the other node is slow"
	}
	return time.Time{}, ""
}

// first is the time of the first event that the other node doesn't know.
func (st *stream) first() (first time.Time) {
	for _, t := range st.oldest {
		if !t.IsZero() && (first.IsZero() || t.Before(first)) {
			first = t
		}
	}
	return first
}

// behind is for how long the other node lacks flows.
func (st *stream) behind(now time.Time) (behind time.Duration) {
	st.mu.Lock()
	defer st.mu.Unlock()
	since := st.first()
	for _, c := range st.all {
		if !c.since.IsZero() && (since.IsZero() || c.since.Before(since)) {
			since = c.since
		}
	}
	if since.IsZero() {
		return 0
	}
	return now.Sub(since)
}

func (st *stream) run(ctx context.Context) {
	log := klog.FromContext(ctx).WithValues("node", st.node)
	refused := ""
	for pause := st.s.limits.retry; ; pause *= 2 {
		began := time.Now()
		err := st.connect(ctx)
		if ctx.Err() != nil {
			return
		}
		st.s.metrics.restarts.WithLabelValues("connection").Inc()
		st.restart("there is no connection to the node: " + err.Error())
		if time.Since(began) > st.s.limits.mostRetry {
			pause = st.s.limits.retry
		}
		most, again := st.s.limits.mostRetry, false
		if errors.As(err, new(frames.Refusal)) { // its coild is of another version
			again = refused == err.Error()
			most, refused = st.s.limits.whole, err.Error()
		}
		if pause = min(pause, most); again {
			log.V(2).Info("A node still doesn't keep connections of floating addresses", "reason", err)
		} else {
			log.Error(err, "Connections of floating addresses aren't copied to the node that takes the addresses when this one fails, trying again")
		}
		if !wait(ctx, pause) {
			return
		}
	}
}

// told lets the state of all addresses be looked at.
func (st *stream) told() {
	if st.s.cfg.Told == nil {
		return
	}
	st.mu.Lock()
	var blocks []string
	for block := range st.all {
		blocks = append(blocks, block)
	}
	st.mu.Unlock()
	for _, block := range blocks {
		st.s.cfg.Told(block)
	}
}

// connect copies flows until ctx or the connection ends.
func (st *stream) connect(ctx context.Context) error {
	conn, err := st.s.cfg.Dial(ctx, st.node)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	turn := &exchange{st: st, ctx: ctx, conn: conn}
	// A node that can't follow says so before connections are read for it.
	if err := turn.write(frames.Follow, nil); err != nil {
		return err
	}
	if _, err := turn.answer(); err != nil {
		return err
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-st.wake:
			timer.Reset(st.s.limits.turn)
			continue
		case <-timer.C:
		}
		next, err := turn.take()
		if err != nil {
			return err
		}
		timer.Reset(next)
	}
}

// starting returns the addresses whose flows are all to be sent now.
func (st *stream) starting(now time.Time) (all []lead) {
	st.mu.Lock()
	defer st.mu.Unlock()
	for _, c := range st.all {
		if len(all) == mostStarting {
			break // the others have the next turns
		}
		if c.watched && !now.Before(c.again) && (!c.has || now.Sub(c.whole) >= st.s.limits.whole) {
			if c.pause *= 2; c.has {
				c.pause = 0
			}
			c.pause = min(max(c.pause, st.s.limits.retry), st.s.limits.whole)
			// has says whether something is lost from now on.
			c.has, c.whole, c.again = true, now, now.Add(c.pause)
			all = append(all, c.lead)
		}
	}
	if len(all) > 0 { // flows that begin until the next turn may be read, too
		st.dumped = [2]bool{true, true}
	}
	return all
}

// failed notes that the flows of addresses couldn't be read.
func (st *stream) failed(all []lead, why error) {
	defer st.told()
	st.mu.Lock()
	defer st.mu.Unlock()
	for _, a := range all {
		if c := st.all[a.Block]; c != nil && c.lead == a {
			c.lacks(why.Error())
		}
	}
}

// settled takes the answer of the other node about a turn in which all flows of some addresses were sent.
func (st *stream) settled(whole []lead, got answer) (next time.Duration, news bool) {
	st.mu.Lock()
	defer st.mu.Unlock()
	for _, a := range whole {
		if c := st.all[a.Block]; c != nil && c.lead == a && c.has && !c.since.IsZero() && !got.refuses(a.Block) {
			c.since, c.why, news = time.Time{}, "", true
		}
	}
	for block, why := range got.Refused {
		if c := st.all[block]; c != nil {
			news = news || c.since.IsZero()
			c.lacks("the node doesn't take them: " + cmp.Or(why, "like those of many other addresses"))
		}
	}
	for _, c := range st.all {
		if got.Others {
			news = news || c.since.IsZero()
			c.lacks("the node doesn't take those of many addresses")
		}
	}
	st.oldest[2] = time.Time{}
	next = st.s.limits.beat
	if len(st.young)+len(st.due)+len(st.over) > 0 {
		next = st.s.limits.turn
	}
	for _, c := range st.all {
		due := c.again
		if whole := c.whole.Add(st.s.limits.whole); c.has && whole.After(due) {
			due = whole
		}
		if c.watched {
			next = min(next, max(time.Until(due), st.s.limits.turn))
		}
	}
	return next, news
}
