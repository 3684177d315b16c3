package holding

import (
	"container/heap"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// world is a cluster in simulated time: nodes, the network between them, and an API server. All of it comes from one number, so that
// a history can be seen again.
type world struct {
	rand    *rand.Rand
	now     time.Duration
	queue   events
	count   int
	nodes   []*simNode
	records map[string]Record
	version uint64
	// odd is how probable it is that a message comes late, or twice.
	odd float64
	// down says that the API server answers nobody, slow is how long a request to it takes at most.
	down bool
	slow time.Duration
	// late is how probable it is that a write is done long after its sender has given up.
	late float64
	// cut has the directed links that lose all messages, loss is the part that the others lose.
	cut  map[[2]string]bool
	loss float64
	// lag is by how much messages of a link are late. fate, if there is one, says of a request how late it is, and whether it is lost.
	lag  map[[2]string]time.Duration
	fate func(n *simNode, write *Record) (late time.Duration, lost bool)
	// breaks changes a machine after each step, to show that the simulation notices a wrong protocol.
	breaks func(*Machine)
	rules  rules
	// deaf says that nodes don't stop when they are told to.
	deaf  bool
	trace *strings.Builder
}

// simNode is a machine of the cluster.
type simNode struct {
	name    string
	power   bool
	machine *Machine // nil while the program doesn't run
	life    uint64
	// offset and rate make the node's clock of the world's time.
	offset time.Duration
	rate   float64
	// paused is until when the program gets no processor, stall that its next step is followed by such a pause.
	paused, stall time.Duration
	inbox         []func() // what has come meanwhile
	cut           bool     // from the API server
	ready         bool
	tick          int
	answers       map[string][]span
	announced     int // how often
}

// span is a time in which a node answers for an address.
type span struct{ from, to time.Duration }

type event struct {
	at  time.Duration
	seq int
	do  func()
}

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].seq < e[j].seq
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}

func newWorld(seed uint64, nodes int) *world {
	w := &world{
		rand: rand.New(rand.NewPCG(seed, 1)), records: map[string]Record{}, cut: map[[2]string]bool{}, lag: map[[2]string]time.Duration{},
		slow: 20 * time.Millisecond, rules: defaults(),
	}
	for i := range nodes {
		n := &simNode{
			name: fmt.Sprintf("n%d", i), offset: w.upTo(time.Hour), rate: 0.99 + 0.02*w.rand.Float64(),
			ready: true, answers: map[string][]span{},
		}
		w.nodes = append(w.nodes, n)
	}
	return w
}

// upTo returns a random time.
func (w *world) upTo(d time.Duration) time.Duration { return time.Duration(w.rand.Int64N(int64(d))) }

func (w *world) between(a, b time.Duration) time.Duration { return a + w.upTo(b-a) }

func (w *world) chance(p float64) bool { return w.rand.Float64() < p }

func (w *world) after(d time.Duration, do func()) { w.at(w.now+d, do) }

func (w *world) at(t time.Duration, do func()) {
	w.count++
	heap.Push(&w.queue, event{t, w.count, do})
}

// run lets time pass.
func (w *world) run(until time.Duration) {
	for len(w.queue) > 0 && w.queue[0].at <= until {
		e := heap.Pop(&w.queue).(event)
		w.now = e.at
		e.do()
	}
	w.now = until
}

func (w *world) tell(format string, args ...any) {
	if w.trace != nil {
		fmt.Fprintf(w.trace, "%7.3f "+format+"\n", append([]any{w.now.Seconds()}, args...)...)
	}
}

func (n *simNode) local(t time.Duration) time.Duration {
	return n.offset + time.Duration(n.rate*float64(t))
}

func (n *simNode) real(local time.Duration) time.Duration {
	return time.Duration(float64(local-n.offset) / n.rate)
}

// start begins a life of the program on a node.
func (w *world) start(n *simNode) {
	if n.machine != nil {
		return
	}
	w.tell("%s starts", n.name)
	n.power = true
	n.life = w.rand.Uint64()
	n.machine = New(n.name, n.life, n.local(w.now))
	n.machine.rules = w.rules
	n.paused, n.stall, n.inbox = 0, 0, nil
	w.relist(n)
	for id := range w.all() {
		w.after(w.upTo(300*time.Millisecond), func() { w.step(n, Ready{ID: id, Ready: n.ready}) })
	}
	w.step(n, Tick{})
}

// kill ends the program of a node, whose kernel goes on.
func (w *world) kill(n *simNode) {
	w.tell("%s is killed", n.name)
	n.machine = nil
}

// cutPower ends all on a node.
func (w *world) cutPower(n *simNode) {
	w.tell("%s is switched off", n.name)
	n.machine, n.power = nil, false
	for id := range n.answers {
		w.silence(n, id)
	}
}

// deliver calls do in the life of a node, later and in order if it is paused.
func (w *world) deliver(n *simNode, do func()) {
	switch {
	case n.machine == nil:
	case w.now < n.paused:
		if n.inbox = append(n.inbox, do); len(n.inbox) == 1 {
			w.at(n.paused, func() { w.resume(n, n.life) })
		}
	default:
		do()
	}
}

// resume ends a pause, unless it became longer.
func (w *world) resume(n *simNode, life uint64) {
	if n.machine == nil || n.life != life {
		return
	}
	if w.now < n.paused {
		w.at(n.paused, func() { w.resume(n, life) })
		return
	}
	inbox := n.inbox
	n.inbox = nil
	for _, do := range inbox {
		w.deliver(n, do) // one of them may begin the next pause
	}
}

// step gives an event to a node.
func (w *world) step(n *simNode, e Event) {
	w.deliver(n, func() {
		if w.trace != nil {
			if _, tick := e.(Tick); !tick {
				w.tell("%s gets %T%+v", n.name, e, e)
			}
		}
		actions := n.machine.Step(n.local(w.now), e)
		if w.breaks != nil {
			w.breaks(n.machine)
		}
		n.tick++
		tick := n.tick
		w.at(max(n.real(n.machine.Next()), w.now+time.Microsecond), func() {
			if n.tick == tick {
				w.step(n, Tick{})
			}
		})
		if n.stall > 0 {
			// It stands still between the decision and what follows from it.
			n.paused, n.stall = max(n.paused, w.now+n.stall), 0
			w.deliver(n, func() { w.do(n, actions) })
			return
		}
		w.do(n, actions)
	})
}

func (w *world) do(n *simNode, actions []Action) {
	for _, a := range actions {
		switch a := a.(type) {
		case Send:
			w.send(n, a)
		case Read:
			w.read(n)
		case Write:
			w.write(n, a.Record)
		case Answer:
			w.answer(n, a)
		case Stop:
			if !w.deaf {
				w.silence(n, a.ID)
			}
		}
	}
}

func (w *world) send(n *simNode, a Send) {
	if w.cut[[2]string{n.name, a.To}] || w.chance(w.loss) {
		return
	}
	delay := w.between(100*time.Microsecond, 3*time.Millisecond) + w.lag[[2]string{n.name, a.To}]
	if w.chance(w.odd) {
		delay = w.upTo(2 * time.Second)
	}
	times := 1
	if w.chance(w.odd) {
		times = 2
	}
	for range times {
		w.after(delay, func() { w.step(w.node(a.To), Received{n.name, a.Message}) })
		delay += w.upTo(time.Second)
	}
}

func (w *world) node(name string) *simNode {
	for _, n := range w.nodes {
		if n.name == name {
			return n
		}
	}
	panic(name)
}

// requestTimeout is that of a node's requests.
const requestTimeout = time.Second

// request sends one to the API server, which handles it at one moment, and calls done once: with whether there was an answer. write
// is nil for a read.
func (w *world) request(n *simNode, write *Record, handle func(), done func(ok bool)) {
	life, ended := n.life, false
	end := func(ok bool) {
		if !ended && n.machine != nil && n.life == life {
			ended = true
			w.deliver(n, func() { done(ok) })
		}
	}
	w.after(requestTimeout, func() { end(false) })
	there := w.between(time.Millisecond, w.slow)
	if write != nil && w.chance(w.late) {
		there = w.between(time.Second, 5*time.Second)
	}
	back := w.between(time.Millisecond, w.slow)
	lost := n.cut
	if w.fate != nil && !lost {
		var late time.Duration
		late, lost = w.fate(n, write)
		there += late
	}
	if lost {
		return
	}
	w.after(there, func() {
		if w.down {
			w.after(back, func() { end(false) })
			return
		}
		handle()
		w.after(back, func() {
			if !n.cut {
				end(true)
			}
		})
	})
}

func (w *world) read(n *simNode) {
	var answer ReadDone
	w.request(n, nil, func() {
		answer.Version = w.version
		for id := range w.all() {
			if r := w.records[id]; r.Holder == n.name {
				answer.Records = append(answer.Records, r)
			}
		}
	}, func(ok bool) {
		if !ok {
			answer = ReadDone{Err: errors.New("no answer")}
		}
		w.step(n, answer)
	})
}

func (w *world) write(n *simNode, r Record) {
	answer := WriteDone{ID: r.ID}
	w.request(n, &r, func() {
		if w.records[r.ID].Version != r.Version {
			answer.Outcome = Changed
			return
		}
		w.change(r)
		answer.Outcome, answer.Written = Written, w.records[r.ID]
	}, func(ok bool) {
		if !ok {
			answer = WriteDone{ID: r.ID, Outcome: Unknown}
		}
		w.step(n, answer)
	})
}

// change is a write of the API server, which all who watch see.
func (w *world) change(r Record) {
	w.version++
	r.Version = w.version
	w.records[r.ID] = r
	w.tell("record is %+v", r)
	for _, n := range w.nodes {
		life := n.life
		w.after(w.between(time.Millisecond, w.slow), func() {
			if !n.cut && !w.down && n.life == life {
				w.step(n, Seen{r})
			}
		})
	}
}

// relist shows all records to a node, as when its watch begins.
func (w *world) relist(n *simNode) {
	if n.cut || w.down {
		return
	}
	for id := range w.all() {
		r, life := w.records[id], n.life
		w.after(w.between(time.Millisecond, w.slow), func() {
			if n.life == life {
				w.step(n, Seen{r})
			}
		})
	}
}

func (w *world) answer(n *simNode, a Answer) {
	until := n.real(a.Until)
	if until <= w.now {
		return
	}
	if a.Announce {
		n.announced++
	}
	spans := n.answers[a.ID]
	if last := len(spans) - 1; last >= 0 && spans[last].to >= w.now {
		spans[last].to = until
		return
	}
	w.tell("%s answers for %s in epoch %d", n.name, a.ID, a.Epoch)
	n.answers[a.ID] = append(spans, span{w.now, until})
}

func (w *world) silence(n *simNode, id string) {
	spans := n.answers[id]
	if last := len(spans) - 1; last >= 0 && spans[last].to > w.now {
		w.tell("%s stops", n.name)
		spans[last].to = w.now
	}
}

// answering returns the nodes that answer for an address now.
func (w *world) answering(id string) []string {
	var names []string
	for _, n := range w.nodes {
		if spans := n.answers[id]; len(spans) > 0 && spans[len(spans)-1].to > w.now {
			names = append(names, n.name)
		}
	}
	return names
}

// twice returns the longest time in which more than one node has answered for an address, and its beginning.
func (w *world) twice(id string) (longest, at time.Duration) {
	type edge struct {
		at    time.Duration
		delta int
	}
	var edges []edge
	for _, n := range w.nodes {
		for _, s := range n.answers[id] {
			edges = append(edges, edge{s.from, 1}, edge{s.to, -1})
		}
	}
	slices.SortFunc(edges, func(a, b edge) int {
		if a.at != b.at {
			return int(a.at - b.at)
		}
		return a.delta - b.delta
	})
	count, began := 0, time.Duration(0)
	for _, e := range edges {
		if count >= 2 && count+e.delta < 2 && e.at-began > longest {
			longest, at = e.at-began, began
		}
		if count < 2 && count+e.delta >= 2 {
			began = e.at
		}
		count += e.delta
	}
	return longest, at
}

// gap returns the longest time within two moments in which nobody has answered for an address.
func (w *world) gap(id string, from, to time.Duration) time.Duration {
	var spans []span
	for _, n := range w.nodes {
		spans = append(spans, n.answers[id]...)
	}
	slices.SortFunc(spans, func(a, b span) int { return int(a.from - b.from) })
	longest, end := time.Duration(0), from
	for _, s := range spans {
		longest = max(longest, min(s.from, to)-end)
		end = max(end, s.to)
	}
	return max(longest, to-end)
}
