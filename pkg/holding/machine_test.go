package holding

import (
	"slices"
	"testing"
	"time"
)

// script gives one machine of node n1 what a test says, and keeps what it does.
type script struct {
	*Machine
	t   *testing.T
	now time.Duration
	did []Action
}

// newScript begins one. Of the record, n1 is a successor.
func newScript(t *testing.T, r Record) *script {
	s := &script{Machine: New("n1", 5, time.Hour), t: t, now: time.Hour}
	s.take(Ready{ID: address1, Ready: true})
	s.take(Seen{r})
	return s
}

func record(version uint64, holder string) Record {
	nodes := []string{"n1", "n2", "n3"}
	return Record{ID: address1, Version: version, Holder: holder, Epoch: 4, Voters: nodes, Successors: nodes}
}

func (s *script) take(e Event) {
	s.did = append(s.did, s.Step(s.now, e)...)
}

// wait lets time pass, a Tick at each moment that the machine asks for.
func (s *script) wait(d time.Duration) {
	for until := s.now + d; s.now < until; {
		s.now = min(until, max(s.Next(), s.now+time.Microsecond))
		s.take(Tick{})
	}
}

// done returns the actions of a kind since the last call.
func done[T Action](s *script) []T {
	var all []T
	s.did = slices.DeleteFunc(s.did, func(a Action) bool {
		one, ok := a.(T)
		if ok {
			all = append(all, one)
		}
		return ok
	})
	return all
}

// confirm answers a Read: this node is the holder.
func (s *script) confirm(r Record) {
	s.t.Helper()
	if len(done[Read](s)) == 0 {
		s.t.Fatalf("no read is wanted; actions: %+v", s.did)
	}
	s.take(ReadDone{Version: r.Version, Records: []Record{r}})
}

// newHolder begins one of the holder, which answers.
func newHolder(t *testing.T) *script {
	t.Helper()
	r := record(9, "n1")
	s := newScript(t, r)
	s.confirm(r)
	s.wait(600 * time.Millisecond)
	return s
}

// A holder that begins reads before it answers: the record that it has seen may be old.
func TestHolderBegins(t *testing.T) {
	r := record(9, "n1")
	s := newScript(t, r)
	s.confirm(r)
	if a := done[Answer](s); len(a) > 0 {
		t.Errorf("it answers at once: %+v", a)
	}
	s.wait(500 * time.Millisecond)
	if a := done[Answer](s); len(a) != 1 || !a[0].Announce || a[0].Until != time.Hour+1400*time.Millisecond || a[0].Epoch != 4 {
		t.Errorf("it answers %+v, want once, announced, for 1.4 s from the read on", a)
	}
	s.wait(2 * time.Second)
	if a := done[Stop](s); len(a) != 1 {
		t.Errorf("it stops %d times without an answer to its reads, want once", len(a))
	}
}

// A node that doesn't know yet whether it is ready gives nothing up.
func TestUnknownReadiness(t *testing.T) {
	s := &script{Machine: New("n1", 5, 0), t: t}
	s.take(Seen{record(9, "n1")})
	s.wait(5 * time.Second)
	if w, a := done[Write](s), done[Answer](s); len(w)+len(a) > 0 {
		t.Errorf("it writes %+v and answers %+v", w, a)
	}
	s.take(Ready{ID: address1})
	w := done[Write](s)
	if len(w) != 1 || w[0].Holder != "" || !w[0].HandedOver || w[0].Epoch != 5 || w[0].Version != 9 {
		t.Errorf("not ready, it writes %+v, want that nobody holds the address", w)
	}
	if len(done[Stop](s)) != 1 {
		t.Error("an earlier life may have made the node answer, but it isn't told to stop")
	}
}

// A holder that isn't ready any more hands the address over to the node that was prepared, if that is a successor that it hears.
func TestUnreadyHandsOver(t *testing.T) {
	for name, c := range map[string]struct {
		heard      string
		successors []string
		want       string
	}{
		"the second one, which is heard": {"n3", []string{"n1", "n2", "n3"}, "n3"},
		"not heard":                      {"n2", []string{"n1", "n2", "n3"}, ""},
		"no successor any more":          {"n3", []string{"n1", "n2"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			s := newHolder(t)
			r := record(10, "n1")
			r.Successors, r.Voters = c.successors, c.successors
			s.take(Seen{r})
			s.take(Received{c.heard, Message{Kind: Heartbeat, Stamp: Stamp{77, time.Minute}, Echo: Stamp{5, s.now}}})
			done[Write](s)
			done[Stop](s)
			s.take(Ready{address1, false, "n3"})
			w := done[Write](s)
			if len(w) != 1 || w[0].Holder != c.want || !w[0].HandedOver || w[0].Epoch != 5 || w[0].Version != 10 {
				t.Errorf("it writes %+v, want that %q is the holder", w, c.want)
			}
			if got := done[Stop](s); len(got) != 1 {
				t.Errorf("it stops %d times, want once", len(got))
			}
		})
	}
}

// A live read that doesn't have this node as the holder counts more than an older record, and less than a newer one.
func TestDenied(t *testing.T) {
	for version, stops := range map[uint64]int{8: 0, 9: 1, 12: 1} {
		s := newHolder(t)
		done[Read](s)
		s.take(ReadDone{Version: version})
		if got := len(done[Stop](s)); got != stops {
			t.Errorf("a list of version %d without the address: it stops %d times, want %d", version, got, stops)
		}
	}
}

// Old records of the watch change nothing.
func TestOldRecord(t *testing.T) {
	s := newHolder(t)
	s.take(Seen{record(7, "n2")})
	if got := done[Stop](s); len(got) > 0 {
		t.Error("it stops because of a record that is older")
	}
	s.take(Seen{record(10, "n2")})
	if got := done[Stop](s); len(got) != 1 {
		t.Errorf("it stops %d times when another node is the holder, want once", len(got))
	}
}

// A forged answer of another node doesn't take an address away, and isn't answered more than once a second.
func TestDisputed(t *testing.T) {
	s := newHolder(t)
	done[Answer](s)
	for range 50 {
		s.take(Disputed{address1})
		s.wait(100 * time.Millisecond)
		if len(done[Read](s)) > 0 {
			s.take(ReadDone{Version: 9, Records: []Record{record(9, "n1")}})
		}
	}
	announced := 0
	for _, a := range done[Answer](s) {
		if a.Announce {
			announced++
		}
	}
	if announced < 4 || announced > 5 {
		t.Errorf("it announces the address %d times in 5 s, want once a second", announced)
	}
	if got := done[Stop](s); len(got) > 0 {
		t.Errorf("it stops %d times", len(got))
	}
}

// Without the API server an address is defended as well, as long as a majority has granted it a lease since.
func TestDisputedWithoutAPI(t *testing.T) {
	w := begin(1, 3, nil, address1)
	w.run(w.now + 10*time.Second)
	h := w.holder(t)
	w.down = true
	w.run(w.now + 10*time.Second)
	since := h.announced
	w.step(h, Disputed{address1})
	w.run(w.now + time.Second)
	if got := h.announced - since; got != 1 {
		t.Errorf("without the API server it announces a disputed address %d times, want once", got)
	}
}

// A node that drops the packets gives the address up once: to one that doesn't, and for good. If all do, one of them has it.
func TestBlocked(t *testing.T) {
	for _, all := range []bool{false, true} {
		w := begin(2, 3, nil, address1)
		w.run(w.now + 10*time.Second)
		first, at, before := w.holder(t), w.now, w.records[address1].Epoch
		blocked := func(h *simNode) { w.step(h, Blocked{address1, true}) }
		blocked(first)
		for w.now < at+40*time.Second {
			w.run(w.now + 100*time.Millisecond)
			for _, who := range w.answering(address1) {
				if all {
					blocked(w.node(who))
				}
			}
		}
		last, gap := w.holder(t), w.gap(address1, at, w.now)
		switch epoch := w.records[address1].Epoch; {
		case !all && (last == first || gap > time.Second || epoch != before+2):
			t.Errorf("%s has the address after %s, which drops its packets; nobody answered for %v, and the epoch is %d", last.name, first.name, gap, epoch)
		case all && (gap > 12*time.Second || epoch > before+7):
			t.Errorf("if all drop packets, nobody answers for %v, and the epoch is %d", gap, epoch)
		}
	}
}

// A program that will end hands its addresses over, and takes none. Without the API server, or another node, it goes on.
func TestLeave(t *testing.T) {
	for _, c := range []struct {
		name  string
		nodes int
		down  bool
		moves bool
	}{{"others are there", 3, false, true}, {"without the API server", 3, true, false}, {"alone", 1, false, false}} {
		w := begin(3, c.nodes, nil, address1)
		w.run(w.now + 10*time.Second)
		first, at := w.holder(t), w.now
		w.down = c.down
		w.step(first, Leave{})
		w.run(w.now + 5*time.Second)
		if last := w.holder(t); (last != first) != c.moves || first.machine.Leaves() == c.moves {
			t.Errorf("%s: %s has the address after %s", c.name, last.name, first.name)
		}
		if gap := w.gap(address1, at, w.now); gap > 500*time.Millisecond {
			t.Errorf("%s: nobody answers for %v", c.name, gap)
		}
	}
}

// A node without floating addresses sleeps.
func TestIdle(t *testing.T) {
	m := New("n1", 5, 0)
	for _, c := range []struct {
		event Event
		busy  bool
	}{{Tick{}, false}, {Seen{record(1, "n2")}, true}, {Tick{}, true}, {Gone{address1}, false}} {
		m.Step(time.Second, c.event)
		if pause := m.Next() - time.Second; (pause <= m.rules.heartbeat) != c.busy {
			t.Errorf("after %+v it sleeps for %v", c.event, pause)
		}
	}
}

func TestGone(t *testing.T) {
	s := newHolder(t)
	s.take(Gone{address1})
	s.take(Gone{"unknown"})
	s.take(WriteDone{ID: address1})
	if got := done[Stop](s); len(got) != 1 || len(s.addresses) > 0 || len(s.peers) > 0 {
		t.Errorf("it stops %d times, and knows %d addresses and %d peers; want once, and none", len(got), len(s.addresses), len(s.peers))
	}
}

// A message without an echo, or with an old one, may be a repetition: the peer isn't heard, and gets no lease.
func TestRepeatedMessages(t *testing.T) {
	s := newScript(t, record(9, "n3"))
	s.wait(1600 * time.Millisecond)
	done[Send](s)
	heartbeat := func(echo Stamp) Received {
		return Received{"n2", Message{Kind: Heartbeat, Stamp: Stamp{77, time.Minute}, Echo: echo}}
	}
	for name, c := range map[string]struct {
		echo         Stamp
		heard, grant bool
	}{
		"no echo":                 {Stamp{}, false, false},
		"echo of another life":    {Stamp{4, s.now}, false, false},
		"echo of the last hour":   {Stamp{5, s.now - time.Hour}, false, false},
		"echo of the last second": {Stamp{5, s.now - time.Second}, true, true},
	} {
		s.peers["n2"].heard = never
		s.take(heartbeat(c.echo))
		sent := done[Send](s)
		if len(sent) != 1 || sent[0].Kind != Ack || sent[0].Echo != (Stamp{77, time.Minute}) || sent[0].Grant != c.grant {
			t.Errorf("%s: it sends %+v, want one Ack with the stamp, with a lease: %t", name, sent, c.grant)
		}
		if heard := s.peers["n2"].heard == s.now; heard != c.heard {
			t.Errorf("%s: heard: %t, want %t", name, heard, c.heard)
		}
	}
	s.take(Received{"n7", Message{Kind: Heartbeat, Stamp: Stamp{1, 1}}})
	if sent := done[Send](s); len(sent) > 0 {
		t.Errorf("a node that has nothing to do with the address gets %+v", sent)
	}
}

// A node that had no processor for a while takes nothing from others before it has listened again.
func TestStandsStill(t *testing.T) {
	s := newScript(t, record(9, "n2"))
	s.now += time.Minute
	s.take(Tick{})
	s.wait(1400 * time.Millisecond)
	for _, a := range done[Send](s) {
		if a.Kind == VoteRequest {
			t.Fatalf("it asks %s about %s after %v", a.To, a.About, s.now-time.Hour-time.Minute)
		}
	}
	s.wait(200 * time.Millisecond)
	if !slices.ContainsFunc(done[Send](s), func(a Send) bool { return a.Kind == VoteRequest && a.About == "n2" }) {
		t.Error("it doesn't ask about the holder when it has listened for 1.6 s")
	}
}
