package cniconf_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/containernetworking/cni/libcni"
	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/cniconf"
	"github.com/coil-net/coil/pkg/testkit"
)

const name = cniconf.DefaultName

// conflist is a valid one; pad makes it longer.
func conflist(pad string) []byte {
	return fmt.Appendf(nil, `{"cniVersion":"1.1.0","name":"k8s-pod-network","pad":%q,"plugins":[{"type":"coil","socket":"/run/coild.sock"},{"type":"portmap","capabilities":{"portMappings":true}}]}`, pad)
}

func mustStage(t *testing.T, dir string, content []byte) {
	t.Helper()
	if _, err := cniconf.Stage(dir, name, content); err != nil {
		t.Fatal(err)
	}
}

func mustActivate(t *testing.T, dir string) bool {
	t.Helper()
	changed, err := (&cniconf.Keeper{Dir: dir, Name: name}).Activate()
	if err != nil {
		t.Fatal(err)
	}
	return changed
}

func TestStageAndActivate(t *testing.T) {
	dir := t.TempDir()
	other := filepath.Join(dir, "99-other.conflist")
	if err := os.WriteFile(other, []byte("not ours"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := (&cniconf.Keeper{Dir: dir, Name: name}).Activate(); !errors.Is(err, cniconf.ErrNotStaged) {
		t.Errorf("error is %v, want ErrNotStaged", err)
	}
	for i, want := range []bool{true, false} {
		if changed, err := cniconf.Stage(dir, name, conflist("")); err != nil || changed != want {
			t.Fatalf("Stage %d: changed %v, %v", i, changed, err)
		}
	}
	// The staged file isn't a configuration for a runtime.
	if files, err := libcni.ConfFiles(dir, []string{".conf", ".conflist", ".json"}); err != nil || len(files) != 1 {
		t.Errorf("a runtime finds %q, %v, want only the other's", files, err)
	}
	for i, want := range []bool{true, false} {
		if changed := mustActivate(t, dir); changed != want {
			t.Errorf("Activate %d: changed %v", i, changed)
		}
	}
	list, err := libcni.NetworkConfFromFile(filepath.Join(dir, name))
	if err != nil || list.Name != "k8s-pod-network" || len(list.Plugins) != 2 {
		t.Errorf("a runtime reads %+v, %v", list, err)
	}
	if diff := cmp.Diff([]string{name, name + ".staged", "99-other.conflist"}, testkit.FilesIn(t, dir)); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
	if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Mode().Perm() != 0o644 {
		t.Errorf("mode is %v, %v", info.Mode(), err)
	}
}

// Whatever somebody does to the file in place, it comes back.
func TestActivateRestores(t *testing.T) {
	tests := []struct {
		name string
		harm func(path string) error
	}{
		{"removed", os.Remove},
		{"edited", func(p string) error { return os.WriteFile(p, []byte(`{}`), 0o644) }},
		{"emptied", func(p string) error { return os.Truncate(p, 0) }},
		{"of another mode", func(p string) error { return os.Chmod(p, 0o600) }},
		{"a link to the same", func(p string) error {
			return errors.Join(os.Remove(p), os.Symlink(p+".staged", p))
		}},
		{"a link to nothing", func(p string) error {
			return errors.Join(os.Remove(p), os.Symlink(p+".missing", p))
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, name)
			mustStage(t, dir, conflist(""))
			mustActivate(t, dir)
			if err := tt.harm(path); err != nil {
				t.Fatal(err)
			}
			if !mustActivate(t, dir) {
				t.Error("nothing was changed")
			}
			got, err := os.ReadFile(path)
			if err != nil || string(got) != string(conflist("")) {
				t.Errorf("content is %q, %v", got, err)
			}
			if info, err := os.Lstat(path); err != nil || info.Mode() != 0o644 {
				t.Errorf("mode is %v, %v, want a regular file", info.Mode(), err)
			}
			if mustActivate(t, dir) {
				t.Error("the second Activate changed something")
			}
		})
	}
}

func TestActivateKeepsWhatIsInPlaceWhenTheStagedFileIsBroken(t *testing.T) {
	dir := t.TempDir()
	mustStage(t, dir, conflist(""))
	mustActivate(t, dir)
	if err := os.WriteFile(filepath.Join(dir, name+".staged"), conflist("")[:50], 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := (&cniconf.Keeper{Dir: dir, Name: name}).Activate(); err == nil {
		t.Error("a torn file was put in place")
	}
	if got, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(got) != string(conflist("")) {
		t.Errorf("content is %q, %v", got, err)
	}
	if err := os.Remove(filepath.Join(dir, name)); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, name), 0o755); err != nil {
		t.Fatal(err)
	}
	mustStage(t, dir, conflist(""))
	if _, err := (&cniconf.Keeper{Dir: dir, Name: name}).Activate(); err == nil {
		t.Error("a folder was replaced")
	}
}

// The configuration in place stays in use without the staged file, and comes back while coild runs.
func TestWithoutTheStagedFile(t *testing.T) {
	tests := []struct {
		name   string
		live   string // what is in place; empty for no file
		again  bool   // it was activated before by the same process
		want   string // what is then in place
		change bool
	}{
		{name: "nothing is left"},
		{name: "nothing is left, but it was activated", again: true, want: string(conflist("")), change: true},
		{name: "in use", live: string(conflist("x")), want: string(conflist("x"))},
		{name: "in use as activated", live: string(conflist("")), again: true, want: string(conflist(""))},
		{name: "torn", live: string(conflist("x")[:50])},
		{name: "torn, but it was activated", live: string(conflist("x")[:50]), again: true, want: string(conflist("")), change: true},
		{name: "of another plugin", live: `{"cniVersion":"1.1.0","name":"n","plugins":[{"type":"bridge"}]}`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			live, staged := filepath.Join(dir, name), filepath.Join(dir, name+".staged")
			k := cniconf.Keeper{Dir: dir, Name: name}
			if tt.again {
				mustStage(t, dir, conflist(""))
				if _, err := k.Activate(); err != nil {
					t.Fatal(err)
				}
				if err := errors.Join(os.Remove(live), os.Remove(staged)); err != nil {
					t.Fatal(err)
				}
			}
			if tt.live != "" {
				if err := os.WriteFile(live, []byte(tt.live), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			changed, err := k.Activate()
			if changed != tt.change || errors.Is(err, cniconf.ErrNotStaged) != (tt.want == "") || tt.want != "" && err != nil {
				t.Fatalf("changed %v, %v; want %v and %q in place", changed, err, tt.change, tt.want)
			}
			if tt.want == "" {
				return
			}
			for range 2 { // what was found in use is remembered, too
				if got, err := os.ReadFile(live); err != nil || string(got) != tt.want {
					t.Errorf("in place is %q, %v, want %q", got, err, tt.want)
				}
				if err := os.Remove(live); err != nil {
					t.Fatal(err)
				}
				if _, err := k.Activate(); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// A runtime reads the file whenever inotify tells it of a change in the folder.
func TestReadersNeverSeeHalfAConfiguration(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, name)
	fd, err := syscall.InotifyInit1(syscall.IN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(fd)
	if _, err := syscall.InotifyAddWatch(fd, dir, syscall.IN_ALL_EVENTS&^(syscall.IN_OPEN|syscall.IN_ACCESS|syscall.IN_CLOSE_NOWRITE)); err != nil {
		t.Fatal(err)
	}
	const rounds = 60
	big := strings.Repeat("x", 1<<18)
	mustStage(t, dir, conflist(""))
	mustActivate(t, dir)
	written := make(chan error, 1)
	go func() {
		defer close(written)
		for i := range rounds {
			pad := big
			if i%2 == 0 {
				pad = ""
			}
			if _, err := cniconf.Stage(dir, name, conflist(fmt.Sprint(i, pad))); err != nil {
				written <- err
				return
			}
			if _, err := (&cniconf.Keeper{Dir: dir, Name: name}).Activate(); err != nil {
				written <- err
				return
			}
		}
		if err := os.WriteFile(filepath.Join(dir, "end"), nil, 0o600); err != nil {
			written <- err
		}
	}()
	buf := make([]byte, 64<<10)
	last, reads := -1, 0
	for ended := false; !ended; {
		n, err := syscall.Read(fd, buf)
		if err != nil {
			t.Fatal(err)
		}
		for rest := buf[:n]; len(rest) > 0; {
			e := (*syscall.InotifyEvent)(unsafe.Pointer(&rest[0]))
			file := strings.TrimRight(string(rest[syscall.SizeofInotifyEvent:syscall.SizeofInotifyEvent+e.Len]), "\x00")
			rest = rest[syscall.SizeofInotifyEvent+e.Len:]
			ended = ended || file == "end"
			content, err := os.ReadFile(path)
			if err != nil {
				t.Fatalf("after the event of %s: %v", file, err)
			}
			var conf struct{ Pad string }
			if err := json.Unmarshal(content, &conf); err != nil {
				t.Fatalf("after the event of %s: %d bytes: %v", file, len(content), err)
			}
			var i int
			fmt.Sscan(strings.TrimRight(conf.Pad, "x"), &i)
			if i < last {
				t.Fatalf("configuration %d came after %d", i, last)
			}
			last = i
			reads++
		}
	}
	if err := <-written; err != nil {
		t.Fatal(err)
	}
	if last != rounds-1 || reads < rounds {
		t.Errorf("%d reads ended with configuration %d, want %d", reads, last, rounds-1)
	}
}

func TestStaleTemporaryFilesGo(t *testing.T) {
	dir := t.TempDir()
	old := time.Now().Add(-time.Hour)
	for _, f := range []string{"." + name + ".tmp-1", "." + name + ".staged.tmp-2", ".other.tmp-3"} {
		p := filepath.Join(dir, f)
		if err := errors.Join(os.WriteFile(p, nil, 0o600), os.Chtimes(p, old, old)); err != nil {
			t.Fatal(err)
		}
	}
	mustStage(t, dir, conflist(""))
	mustActivate(t, dir)
	if diff := cmp.Diff([]string{".other.tmp-3", name, name + ".staged"}, testkit.FilesIn(t, dir)); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
}

func TestValidate(t *testing.T) {
	list := func(version, plugins string) string {
		return `{"cniVersion":"` + version + `","name":"k8s-pod-network","plugins":` + plugins + `}`
	}
	tests := []struct {
		name, in string
		notes    int
		err      string // part of it; empty for none
	}{
		{name: "good", in: string(conflist(""))},
		{name: "any name", in: strings.Replace(string(conflist("")), "k8s-pod-network", "mine", 1)},
		{name: "behind another plugin", in: list("1.1.0", `[{"type":"ptp"},{"type":"coil"}]`)},
		{name: "of 2.x", in: list("0.4.0", `[{"type":"coil","socket":"/run/coild.sock"}]`), notes: 1},
		{name: "several versions", in: `{"cniVersions":["0.4.0","1.1.0"],"name":"n","plugins":[{"type":"coil"}]}`},
		{name: "empty", in: "", err: "parsing"},
		{name: "torn", in: string(conflist("")[:40]), err: "parsing"},
		{name: "a list", in: "[]", err: "parsing"},
		{name: "no name", in: `{"cniVersion":"1.1.0","plugins":[{"type":"coil"}]}`, err: "no name"},
		{name: "longest name", in: strings.Replace(string(conflist("")), "k8s-pod-network", strings.Repeat("n", 174), 1)},
		{name: "name too long", in: strings.Replace(string(conflist("")), "k8s-pod-network", strings.Repeat("n", 175), 1), err: "175 characters: runtimes name files by it, so that 174 is the most"},
		{name: "bad name", in: strings.Replace(string(conflist("")), "k8s-pod-network", "a b", 1), err: "invalid characters"},
		{name: "a single plugin", in: `{"cniVersion":"1.1.0","name":"n","type":"coil"}`, err: "must be a conflist"},
		{name: "no plugins", in: list("1.1.0", `[]`), err: "no plugins"},
		{name: "a plugin without type", in: list("1.1.0", `[{}]`), err: "missing 'type'"},
		{name: "without coil", in: list("1.1.0", `[{"type":"bridge"}]`), err: `0 plugins of type "coil"`},
		{name: "coil twice", in: list("1.1.0", `[{"type":"coil"},{"type":"coil"}]`), err: `2 plugins of type "coil"`},
		{name: "too old", in: list("0.2.0", `[{"type":"coil"}]`), err: "incompatible CNI versions"},
		{name: "too new", in: list("1.2.0", `[{"type":"coil"}]`), err: "incompatible CNI versions"},
		{name: "no version", in: `{"name":"n","plugins":[{"type":"coil"}]}`, err: "incompatible CNI versions"},
		{name: "relative socket", in: list("1.1.0", `[{"type":"coil","socket":"coild.sock"}]`), err: "absolute path"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			notes, err := cniconf.Validate([]byte(tt.in))
			if tt.err == "" && (err != nil || len(notes) != tt.notes) {
				t.Fatalf("got %q, %v, want %d notes", notes, err, tt.notes)
			}
			if tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)) {
				t.Fatalf("error is %v, want one with %q", err, tt.err)
			}
			dir := t.TempDir()
			if _, err := cniconf.Stage(dir, name, []byte(tt.in)); (err != nil) != (tt.err != "") {
				t.Errorf("Stage: %v", err)
			}
			if _, err := os.Stat(filepath.Join(dir, name+".staged")); errors.Is(err, fs.ErrNotExist) != (tt.err != "") {
				t.Errorf("staged file: %v", err)
			}
		})
	}
}

func TestCheckName(t *testing.T) {
	for n, ok := range map[string]bool{
		"10-coil.conflist": true, "x.conflist": true,
		"": false, ".": false, "..": false, "a/b.conflist": false, "/x.conflist": false, ".conflist": false, ".x.conflist": false,
		"10-coil.conf": false, "10-coil": false, "10-coil.conflist.staged": false,
	} {
		if err := cniconf.CheckName(n); (err == nil) != ok {
			t.Errorf("CheckName(%q) is %v", n, err)
		}
		if !ok {
			if _, err := (&cniconf.Keeper{Dir: t.TempDir(), Name: n}).Activate(); err == nil || errors.Is(err, cniconf.ErrNotStaged) {
				t.Errorf("Activate of %q: %v", n, err)
			}
		}
	}
}

func TestPreferred(t *testing.T) {
	dir := t.TempDir()
	for _, f := range []string{"00-a.conf", "05-b.conflist", "06-c.json", "07-d.txt", "08-e.conflist.staged", name, "20-f.conflist"} {
		if err := os.WriteFile(filepath.Join(dir, f), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, "01-dir.conf"), 0o700); err != nil {
		t.Fatal(err)
	}
	got, err := cniconf.Preferred(dir, name)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"00-a.conf", "05-b.conflist", "06-c.json"}, got); diff != "" {
		t.Errorf("Preferred (-want +got):\n%s", diff)
	}
	if _, err := cniconf.Preferred(filepath.Join(dir, "none"), name); err == nil {
		t.Error("a missing folder has no error")
	}
}

// A runtime reads each configuration that Validate accepts, and the plugin coil is in it once. One that is refused is never
// staged.
func FuzzValidate(f *testing.F) {
	f.Add(conflist(""))
	f.Add([]byte(`{"cniVersion":"0.4.0","name":"a","type":"coil"}`))
	f.Add([]byte(`{"cniVersions":["1.0.0","1.1.0"],"name":"a","disableCheck":"true","plugins":[{"type":"coil"},{"type":"coil"},null]}`))
	f.Add([]byte(`{"cniVersion":"1.1.0","name":"a","loadOnlyInlinedPlugins":true,"plugins":[{"type":"coil","prevResult":{"ips":[null]}}]}`))
	empty := f.TempDir() // one for each input would take most of the time
	f.Fuzz(func(t *testing.T, content []byte) {
		notes, err := cniconf.Validate(content)
		dir := empty
		if err == nil {
			dir = t.TempDir()
		}
		if _, stageErr := cniconf.Stage(dir, name, content); (stageErr == nil) != (err == nil) {
			t.Errorf("%q is valid: %v; staged: %v", content, err, stageErr)
		}
		if err != nil {
			if files := testkit.FilesIn(t, dir); len(files) != 0 || len(notes) != 0 {
				t.Errorf("%q isn't valid, but there are %q and the notes %q", content, files, notes)
			}
			return
		}
		if !mustActivate(t, dir) || mustActivate(t, dir) {
			t.Errorf("%q is put in place twice, or never", content)
		}
		list, err := libcni.NetworkConfFromFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatalf("%q: a runtime reads %v", content, err)
		}
		coil := 0
		for _, p := range list.Plugins {
			if p.Network.Type == "coil" {
				coil++
			}
		}
		if coil != 1 || list.Name == "" || !json.Valid(content) {
			t.Errorf("%q: a runtime reads %+v", content, list)
		}
	})
}
