package coilctl

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/term"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/yaml"

	"github.com/coil-net/coil/pkg/kube/listing"
	"github.com/coil-net/coil/pkg/plan/inventory"
)

// calm is how long the command waits for further changes before it shows them all, and how often it shows any at most.
const calm = 200 * time.Millisecond

// follow shows objects when all are there, and again after changes, until ctx ends. That is no error: somebody has seen enough.
func (t *tool) follow(ctx context.Context, kinds []source, show func(inventory.Objects) error) error {
	c, err := t.connect()
	if err != nil {
		return err
	}
	var done sync.WaitGroup
	defer done.Wait()
	ctx, stop := context.WithCancel(ctx)
	defer stop()

	w := newWatcher(kinds)
	failed, changed := w.failed, w.changed
	var fill []func(*inventory.Objects)
	for i, k := range kinds {
		fill = append(fill, k.follow(ctx, &done, c, w.follower(i)))
	}
	for range kinds {
		select {
		case <-ctx.Done():
			return nil
		case err := <-failed:
			return err
		case <-w.synced:
		}
	}
	if err := w.notInstalled(); err != nil {
		return err
	}
	warn := func(err error) { printf(t.ErrOut, "warning: %v; what is shown may be old until that ends\n", err) }
	for {
		for told := true; told; {
			select {
			case err := <-failed: // it is older than the change that is shown now
				warn(err)
			case <-changed: // that is in what is shown now
			default:
				told = false
			}
		}
		o := inventory.Objects{Now: t.now()}
		for _, f := range fill {
			f(&o)
		}
		if err := show(o); err != nil {
			return err
		}
		for waits := true; waits; {
			select {
			case <-ctx.Done():
				return nil
			case err := <-failed:
				warn(err)
			case <-changed:
				waits = false
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(calm):
		}
	}
}

// watcher hears of the kinds that a command follows.
type watcher struct {
	kinds           []source
	synced, changed chan struct{}
	failed          chan error
	// known says which kinds are there, or aren't installed, as absent says.
	known, absent []atomic.Bool
}

func newWatcher(kinds []source) *watcher {
	n := len(kinds)
	return &watcher{kinds, make(chan struct{}, n), make(chan struct{}, 1), make(chan error, n), make([]atomic.Bool, n), make([]atomic.Bool, n)}
}

// follower is told of one kind.
func (w *watcher) follower(i int) listing.Follower {
	synced := func() {
		if !w.known[i].Swap(true) {
			w.synced <- struct{}{}
		}
	}
	return listing.Follower{
		Synced: synced,
		Changed: func() {
			select {
			case w.changed <- struct{}{}:
			default: // there will be a look already
			}
		},
		Failed: func(err error) {
			if apierrors.IsNotFound(err) && (w.absent[i].Load() || !w.known[i].Load()) {
				w.absent[i].Store(true)
				synced()
				return
			}
			select {
			case w.failed <- fmt.Errorf("watch %s: %w", w.kinds[i].resource, err):
			default: // one of many is enough
			}
		},
	}
}

func (w *watcher) notInstalled() error {
	absent := make([]bool, len(w.kinds))
	for i := range absent {
		absent[i] = w.absent[i].Load()
	}
	return notInstalled(w.kinds, absent)
}

// changes returns what shows rows again and again: on a terminal all of them, elsewhere those that have changed, with what has happened to them.
func (l *list) changes() func(inventory.Objects) error {
	known := map[string]row{}
	var widths []int
	return func(o inventory.Objects) error {
		rows, _ := l.choose(l.rows(o))
		if height := l.height(); height > 0 && l.format == formatTable {
			return l.redraw(height, func() error { return l.show(rows) })
		}
		events := difference(known, rows)
		if l.format != formatTable {
			return l.printEvents(events)
		}
		var cells [][]string
		if widths == nil {
			cells = append(cells, append([]string{"EVENT"}, l.header()...))
		}
		for _, e := range events {
			cells = append(cells, append([]string{e.Type}, l.cells(e.row)...))
		}
		text, now := aligned(cells, widths)
		widths = now
		_, err := io.WriteString(l.Out, text)
		return err
	}
}

// event is what has happened to a row, in the words of watches.
type event struct {
	Type   string `json:"type"`
	Object any    `json:"object"`
	row    row
}

// difference returns what has happened since, in the order of rows, what is gone at the end, and remembers these.
func difference(known map[string]row, rows []row) (events []event) {
	there := map[string]bool{}
	for _, r := range rows {
		key := r.namespace + "/" + r.names[0]
		there[key] = true
		old, had := known[key]
		switch {
		case !had:
			events = append(events, event{"ADDED", r.value, r})
		case !reflect.DeepEqual(old.value, r.value):
			events = append(events, event{"MODIFIED", r.value, r})
		}
		known[key] = r
	}
	var gone []string
	for key := range known {
		if !there[key] {
			gone = append(gone, key)
		}
	}
	slices.Sort(gone)
	for _, key := range gone {
		events = append(events, event{"DELETED", known[key].value, known[key]})
		delete(known, key)
	}
	return events
}

// printEvents prints a line of JSON, or a document of YAML, for each.
func (l *list) printEvents(events []event) error {
	for _, e := range events {
		text, err := json.Marshal(e)
		if l.format == formatYAML {
			if text, err = yaml.Marshal(e); err == nil {
				text = append([]byte("---\n"), bytes.TrimSuffix(text, []byte("\n"))...)
			}
		}
		if err != nil {
			return err
		}
		if _, err := l.Out.Write(append(text, '\n')); err != nil {
			return err
		}
	}
	return nil
}

// height is that of the terminal that is written to, 0 if it isn't one.
func (t *tool) height() int {
	f, ok := t.Out.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return 0
	}
	_, height, err := term.GetSize(int(f.Fd()))
	if err != nil || height < 2 {
		return 24
	}
	return height
}

// clear moves to the upper left corner, and removes what is on the screen and above (ECMA-48: CUP, ED).
const clear = "\x1b[H\x1b[2J\x1b[3J"

// redraw clears the terminal and writes what show does, as far as it has room.
func (t *tool) redraw(height int, show func() error) error {
	var text bytes.Buffer
	out, errOut, colour := t.Out, t.ErrOut, t.colour
	if t.coloured() {
		t.colour = colourAlways
	}
	t.Out, t.ErrOut = &text, &text
	err := show()
	t.Out, t.ErrOut, t.colour = out, errOut, colour
	if err != nil {
		return err
	}
	lines := strings.SplitAfter(strings.TrimSuffix(text.String(), "\n"), "\n")
	if more := len(lines) - (height - 1); more > 0 {
		lines = append(lines[:height-2], fmt.Sprintf("... and %d more lines", more+1))
	}
	_, err = io.WriteString(out, clear+strings.Join(lines, "")+"\n")
	return err
}
