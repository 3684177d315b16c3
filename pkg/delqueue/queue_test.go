package delqueue_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/delqueue"
)

var epoch = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func record(container, ifName string, age time.Duration) delqueue.Record {
	return delqueue.Record{
		ID:           attachment.ID{ContainerID: container, IfName: ifName},
		PodNamespace: "ns", PodName: "pod", QueuedAt: epoch.Add(-age),
	}
}

func mustList(t *testing.T, q delqueue.Queue) []delqueue.Record {
	t.Helper()
	records, aside, err := q.List()
	if err != nil {
		t.Fatal(err)
	}
	if len(aside) > 0 {
		t.Fatalf("set aside %q, want nothing", aside)
	}
	return records
}

func TestQueueGivesBackWhatWasAddedOldestFirst(t *testing.T) {
	q := delqueue.New(filepath.Join(t.TempDir(), "not", "yet", "there"))
	if got := mustList(t, q); len(got) != 0 {
		t.Fatalf("a missing folder lists %v", got)
	}
	long := strings.Repeat("0123456789abcdef", 40) // no file name can hold it
	young, old, longest := record("c1", "eth0", time.Minute), record("c1", "net1", time.Hour), record(long, "eth0", 2*time.Hour)
	// "c_a"+"b" and "c"+"a_b" must not share a file.
	odd, odd2 := record("c_a", "b", 3*time.Hour), record("c", "a_b", 4*time.Hour)
	for _, r := range []delqueue.Record{young, old, longest, odd, odd2, young} {
		if err := q.Add(r); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff([]delqueue.Record{odd2, odd, longest, old, young}, mustList(t, q)); diff != "" {
		t.Errorf("records (-want +got):\n%s", diff)
	}
	for _, r := range []delqueue.Record{old, longest, odd, odd2, old} {
		if err := q.Remove(r.ID); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff([]delqueue.Record{young}, mustList(t, q)); diff != "" {
		t.Errorf("records after Remove (-want +got):\n%s", diff)
	}
}

func TestHas(t *testing.T) {
	q := delqueue.New(filepath.Join(t.TempDir(), "q"))
	long := record(strings.Repeat("0123456789abcdef", 40), "eth0", 0)
	for _, r := range []delqueue.Record{record("c", "eth0", 0), long} {
		for _, step := range []struct {
			name string
			do   func() error
			want bool
		}{
			{"at first", func() error { return nil }, false},
			{"after Add", func() error { return q.Add(r) }, true},
			{"after Remove", func() error { return q.Remove(r.ID) }, false},
		} {
			if err := step.do(); err != nil {
				t.Fatal(err)
			}
			if got, err := q.Has(r.ID); got != step.want || err != nil {
				t.Errorf("%s: has %.8s: %t, %v; want %t", step.name, r.ContainerID, got, err, step.want)
			}
		}
	}
}

func TestQueueIsForRootOnly(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "q")
	q := delqueue.New(dir)
	if err := q.Add(record("c", "eth0", 0)); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]os.FileMode{dir: 0o700, filepath.Join(dir, "c:eth0.json"): 0o600} {
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if got := info.Mode().Perm(); got != want {
			t.Errorf("mode of %s is %v, want %v", path, got, want)
		}
	}
}

func TestQueueSetsGarbageAside(t *testing.T) {
	valid := `{"containerID":"good","ifName":"eth0","queuedAt":"2026-01-02T03:04:05Z"}`
	tests := []struct{ name, file, content string }{
		{"empty", "a:eth0.json", ""},
		{"torn", "b:eth0.json", valid[:30]},
		{"not an object", "c:eth0.json", "[]"},
		{"no ID", "d:eth0.json", "{}"},
		{"ID of another file", "e:eth0.json", valid},
		{"binary", "f:eth0.json", "\x00\xff\xfe"},
		{"huge", "g:eth0.json", `{"containerID":"g","ifName":"eth0","podName":"` + strings.Repeat("x", 1<<20) + `"}`},
		{"bad time", "h:eth0.json", `{"containerID":"h","ifName":"eth0","queuedAt":"yesterday"}`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			q := delqueue.New(dir)
			if err := os.WriteFile(filepath.Join(dir, "good:eth0.json"), []byte(valid), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, tt.file), []byte(tt.content), 0o600); err != nil {
				t.Fatal(err)
			}
			records, aside, err := q.List()
			if err != nil {
				t.Fatal(err)
			}
			if len(records) != 1 || records[0].ContainerID != "good" {
				t.Errorf("records are %v, want the good one", records)
			}
			if diff := cmp.Diff([]string{tt.file}, aside); diff != "" {
				t.Errorf("set aside (-want +got):\n%s", diff)
			}
			kept, err := os.ReadFile(filepath.Join(dir, tt.file+".bad"))
			if err != nil || string(kept) != tt.content {
				t.Errorf("the garbage wasn't kept: %v", err)
			}
			if got := mustList(t, q); len(got) != 1 {
				t.Errorf("the second List gives %v", got)
			}
		})
	}
}

func TestQueueLeavesOtherFilesAlone(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "x:eth0.json"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/etc/passwd", filepath.Join(dir, "y:eth0.json")); err != nil {
		t.Fatal(err)
	}
	fresh, stale := filepath.Join(dir, ".a.json.tmp-1"), filepath.Join(dir, ".b.json.tmp-2")
	note := filepath.Join(dir, "NOTE.txt")
	for _, f := range []string{fresh, stale, note} {
		if err := os.WriteFile(f, []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	old := time.Now().Add(-2 * time.Hour)
	if err := os.Chtimes(stale, old, old); err != nil {
		t.Fatal(err)
	}
	records, aside, err := delqueue.New(dir).List()
	if err != nil || len(records) != 0 {
		t.Fatalf("List gives %v, %v", records, err)
	}
	if diff := cmp.Diff([]string{"x:eth0.json", "y:eth0.json"}, aside); diff != "" {
		t.Errorf("set aside (-want +got):\n%s", diff)
	}
	for _, f := range []string{fresh, note} {
		if _, err := os.Stat(f); err != nil {
			t.Errorf("%s should be left: %v", f, err)
		}
	}
	if _, err := os.Stat(stale); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the stale temporary file is left: %v", err)
	}
}

func TestQueueSaysWhatItCannotRead(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	q := delqueue.New(file)
	if _, _, err := q.List(); err == nil {
		t.Error("a file was listed as an empty queue")
	}
	if err := q.Add(record("c", "eth0", 0)); err == nil {
		t.Error("a record was queued into a file")
	}
	if err := q.Remove(attachment.ID{ContainerID: "c", IfName: "eth0"}); err != nil {
		t.Errorf("a file has no record to remove: %v", err)
	}
}

func TestRemoveSaysThatItFailed(t *testing.T) {
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "c:eth0.json", "full"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := delqueue.New(dir).Remove(attachment.ID{ContainerID: "c", IfName: "eth0"}); err == nil {
		t.Error("a folder that isn't empty was removed")
	}
}

func TestQueueIsBounded(t *testing.T) {
	dir := t.TempDir()
	q := delqueue.New(dir)
	big := record("c", "eth0", 0)
	big.PodName = strings.Repeat("x", 1<<20)
	if err := q.Add(big); err == nil {
		t.Error("a record of 1 MiB was queued")
	}
	for i := range delqueue.MaxRecords {
		f, err := os.Create(filepath.Join(dir, fmt.Sprintf("c%d:eth0.json", i)))
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	if err := q.Add(record("one-more", "eth0", 0)); !errors.Is(err, delqueue.ErrFull) {
		t.Errorf("error is %v, want ErrFull", err)
	}
}

// Plugins add while coild replays: each record is seen, complete, until it is removed.
func TestQueueUnderConcurrency(t *testing.T) {
	q := delqueue.New(t.TempDir())
	const writers, each = 4, 25
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for i := range each {
				if err := q.Add(record(fmt.Sprintf("w%d-%d", w, i), "eth0", 0)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	added := make(chan struct{})
	go func() { wg.Wait(); close(added) }()
	seen := map[string]bool{}
	for last := false; ; {
		for _, r := range mustList(t, q) {
			if r.PodName != "pod" {
				t.Fatalf("record is torn: %+v", r)
			}
			seen[r.ContainerID] = true
			if err := q.Remove(r.ID); err != nil {
				t.Fatal(err)
			}
		}
		if last {
			break
		}
		select {
		case <-added:
			last = true
		default:
		}
	}
	if len(seen) != writers*each {
		t.Errorf("saw %d records, want %d", len(seen), writers*each)
	}
}

// A plugin of another version may have written the records that coild reads: the names of the
// fields are a contract.
func TestRecordFormat(t *testing.T) {
	dir := t.TempDir()
	if err := delqueue.New(dir).Add(record("c", "eth0", 0)); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(filepath.Join(dir, "c:eth0.json"))
	if err != nil {
		t.Fatal(err)
	}
	want := `{"containerID":"c","ifName":"eth0","podNamespace":"ns","podName":"pod","queuedAt":"2026-01-02T03:04:05Z"}` + "\n"
	if string(got) != want {
		t.Errorf("record is %s, want %s", got, want)
	}
}

func FuzzList(f *testing.F) {
	f.Add("c:eth0.json", []byte(`{"containerID":"c","ifName":"eth0"}`))
	f.Add(".json", []byte(`{"containerID":"","ifName":""}`))
	f.Add("a:b.json", []byte(`{"containerID":"../a","ifName":"b"}`))
	f.Fuzz(func(t *testing.T, name string, content []byte) {
		dir := t.TempDir()
		if filepath.Base(name) != name || os.WriteFile(filepath.Join(dir, name), content, 0o600) != nil {
			return // not a file name
		}
		q := delqueue.New(dir)
		records, _, err := q.List()
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range records {
			if err := q.Remove(r.ID); err != nil {
				t.Fatal(err)
			}
		}
		if records, aside, err := q.List(); err != nil || len(records)+len(aside) != 0 {
			t.Fatalf("after Remove of all: %v, %q, %v", records, aside, err)
		}
	})
}
