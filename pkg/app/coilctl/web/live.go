package web

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"github.com/coil-net/coil/pkg/plan/page"
)

const (
	// calm is how often the page changes at most. Where that is much work it changes less often, so that this takes a fifth of a processor at most.
	calm     = 250 * time.Millisecond
	leisure  = 4
	maxPause = 5 * time.Second
	// review is when the page is judged again if nothing changes: some findings only need time to pass.
	review = 10 * time.Second
	// maxGone bounds what is remembered of rows that are gone. Who is further behind gets all rows.
	maxGone = 4096
)

// live is the page of the moment, as long as somebody looks.
type live struct {
	follow func(ctx context.Context, done *sync.WaitGroup, changed func()) (func() page.Cluster, error)
	// linger is for how long the cluster is followed when nobody looks any more: somebody may just load the page again.
	linger time.Duration
	// moved tells that somebody came or went.
	moved chan struct{}

	mu      sync.Mutex // guards what follows
	viewers int
	// version counts the changes of rows; each row has the version that it came with.
	version int64
	rows    map[name]row
	// gone are rows that are there no more, the oldest first. Those of versions up to forgotten aren't all there.
	gone      []gone
	forgotten int64
	cluster   page.Cluster
	// next is closed with the next version.
	next chan struct{}
}

type name struct{ section, key string }

type row struct {
	version int64
	text    json.RawMessage
}

type gone struct {
	version int64
	name    name
}

// enter tells that somebody looks, until leave.
func (l *live) enter() { l.move(1) }

func (l *live) leave() { l.move(-1) }

func (l *live) move(n int) {
	l.mu.Lock()
	l.viewers += n
	l.mu.Unlock()
	select {
	case l.moved <- struct{}{}:
	default: // that is told already
	}
}

func (l *live) watched() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.viewers > 0
}

// run follows the cluster whenever somebody looks.
func (l *live) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-l.moved:
		}
		for l.watched() && ctx.Err() == nil {
			l.watch(ctx)
		}
	}
}

// watch follows the cluster until nobody looks any more.
func (l *live) watch(ctx context.Context) {
	var done sync.WaitGroup
	defer l.forget()
	defer done.Wait()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	changed := make(chan struct{}, 1)
	look, err := l.follow(ctx, &done, func() {
		select {
		case changed <- struct{}{}:
		default: // there will be a look already
		}
	})
	if err != nil {
		look = func() page.Cluster {
			return page.Cluster{Sources: []page.Source{{Resource: "cluster", Problem: err.Error()}}}
		}
	}
	var lonely <-chan time.Time
	for {
		began := time.Now()
		l.publish(look())
		pause, later := time.After(min(max(calm, leisure*time.Since(began)), maxPause)), time.After(review)
		var ready <-chan struct{} // what changes during the pause is shown after it
		for waits := true; waits; {
			select {
			case <-ctx.Done():
				return
			case <-l.moved:
				switch watched := l.watched(); {
				case watched:
					lonely = nil
				case lonely == nil:
					lonely = time.After(l.linger)
				}
			case <-lonely:
				return
			case <-pause:
				ready = changed
			case <-ready:
				waits = false
			case <-later:
				waits = false
			}
		}
	}
}

// forget frees what nobody looks at.
func (l *live) forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.version++
	l.forgotten = l.version
	l.rows, l.gone, l.cluster = nil, nil, page.Cluster{}
}

// publish compares the page with the one before, and tells those who look.
func (l *live) publish(c page.Cluster) {
	now := map[name]json.RawMessage{}
	for _, r := range page.Rows(c) {
		text, err := json.Marshal(r.Value)
		if err != nil { // a value of this program
			text, _ = json.Marshal(err.Error())
		}
		now[name{r.Section, r.Key}] = text
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cluster = c
	version, first := l.version+1, l.rows == nil
	if first {
		l.rows = make(map[name]row, len(now))
	}
	changes := first
	for n, text := range now {
		if old, had := l.rows[n]; !had || !bytes.Equal(old.text, text) {
			l.rows[n], changes = row{version, text}, true
		}
	}
	for n := range l.rows {
		if _, there := now[n]; !there {
			delete(l.rows, n)
			l.gone, changes = append(l.gone, gone{version, n}), true
		}
	}
	if more := len(l.gone) - maxGone; more > 0 {
		l.forgotten = l.gone[more-1].version
		l.gone = append([]gone(nil), l.gone[more:]...)
	}
	if !changes {
		return
	}
	l.version = version
	close(l.next)
	l.next = make(chan struct{})
}

// update is what somebody is told.
type update struct {
	// All says that there are no other rows than these.
	All bool `json:"all,omitempty"`
	// Now is the time of this computer: the browser may be on another one.
	Now  time.Time                             `json:"now"`
	Rows map[string]map[string]json.RawMessage `json:"rows,omitempty"`
	Gone map[string][]string                   `json:"gone,omitempty"`
}

// since returns what has changed since a version, 0 for all, as JSON; nil if nothing has. With it come the version that it leads to, and what is closed when there
// is a newer one.
func (l *live) since(version int64) (text []byte, now int64, next <-chan struct{}, err error) {
	l.mu.Lock()
	u := update{All: version <= l.forgotten, Now: time.Now(), Rows: map[string]map[string]json.RawMessage{}, Gone: map[string][]string{}}
	now, next = l.version, l.next
	if l.rows == nil || version == now {
		l.mu.Unlock()
		return nil, version, next, nil
	}
	for n, r := range l.rows {
		if u.All || r.version > version {
			if u.Rows[n.section] == nil {
				u.Rows[n.section] = map[string]json.RawMessage{}
			}
			u.Rows[n.section][n.key] = r.text
		}
	}
	for _, g := range l.gone {
		// A row may be there again.
		if _, there := l.rows[g.name]; !u.All && g.version > version && !there {
			u.Gone[g.name.section] = append(u.Gone[g.name.section], g.name.key)
		}
	}
	l.mu.Unlock()
	text, err = json.Marshal(u)
	if err != nil {
		err = fmt.Errorf("write the page as JSON: %w", err)
	}
	return text, now, next, err
}

// find searches the cluster, if somebody looks.
func (l *live) find(query string) (r page.Result, ok bool) {
	l.mu.Lock()
	c, ok := l.cluster, l.rows != nil
	l.mu.Unlock()
	if !ok {
		return r, false
	}
	return page.Find(c, query), true
}
