package coild

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/coil-net/coil/pkg/observe"
	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/store/sqlite"
	"github.com/coil-net/coil/pkg/testkit"
)

func TestDebugSocket(t *testing.T) {
	for socket, want := range map[string]string{
		"/run/coild.sock": "/run/coild-debug.sock", "/var/run/a.b/coild": "/var/run/a.b/coild-debug", "/x/a.b.sock": "/x/a.b-debug.sock",
	} {
		if got := (&Options{Socket: socket}).debugSocket(); got != want {
			t.Errorf("%s: %s, want %s", socket, got, want)
		}
	}
}

// Words that ask for nothing are a wrong use, as wrong flags are.
func TestDebugUse(t *testing.T) {
	for _, args := range [][]string{
		{}, {"secrets"}, {"pod"}, {"pod", "a"}, {"address", "x"}, {"db", "x"}, {"--timeout=1s"}, {"pod", "a", "--timeout=1s"}, {"address", "x", "--timeout=1s"}, {"node", "--timeout=0s"}, {"node", "--socket=x"}, {"node", "--x"}, {"send", "shop/a", "tcp", "203.0.113.5", "443", "11"},
	} {
		if code := debugMain(args); code != 2 {
			t.Errorf("%q: exit code %d, want 2", args, code)
		}
	}
	for _, word := range []string{"node", "record", "db"} {
		if code := debugMain([]string{word, "--socket=" + t.TempDir() + "/coild.sock"}); code != 1 {
			t.Errorf("%s without coild: exit code %d, want 1", word, code)
		}
	}
}

// printed runs "coild debug", and returns what it prints on the standard output and the standard error.
func printed(t *testing.T, args ...string) (code int, out, errOut []byte) {
	t.Helper()
	dir, stdout, stderr := t.TempDir(), os.Stdout, os.Stderr
	o, e := testkit.Must(os.Create(filepath.Join(dir, "out")))(t), testkit.Must(os.Create(filepath.Join(dir, "err")))(t)
	os.Stdout, os.Stderr = o, e
	code = debugMain(args)
	os.Stdout, os.Stderr = stdout, stderr
	testkit.Check(t, o.Close(), e.Close())
	return code, testkit.Must(os.ReadFile(o.Name()))(t), testkit.Must(os.ReadFile(e.Name()))(t)
}

// "coild debug db" prints a record that coild can open, with its sum beside it, and "coild debug record" its rows.
func TestDebugRecord(t *testing.T) {
	dir := t.TempDir()
	options := sqlite.Options{Path: filepath.Join(dir, "coild.db"), Identity: store.Identity{NodeName: "n1", MachineID: "m"}, BootID: "boot", CoolDown: time.Minute}
	s, _, err := sqlite.Open(t.Context(), options)
	testkit.Check(t, err)
	defer func() { testkit.Check(t, s.Close()) }()
	testkit.Check(t, s.Rebuilt(t.Context()))
	d := &daemon{Options: Options{Socket: filepath.Join(dir, "coild.sock"), NodeName: "n1"}, store: s, self: &corev1.Node{}, health: observe.NewHealth()}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- d.serveDebug(ctx) }()
	defer func() { cancel(); testkit.Check(t, <-ended) }()
	testkit.Eventually(t, 5*time.Second, "the socket is served", func() error { _, err := os.Stat(d.debugSocket()); return err })

	code, out, errOut := printed(t, "db", "--socket="+d.Socket)
	sha := sha256.Sum256(out)
	want := inspection.Sum{Bytes: int64(len(out)), SHA256: hex.EncodeToString(sha[:])}
	if got, err := inspection.FindSum(string(errOut)); code != 0 || err != nil || got != want {
		t.Fatalf("exit code %d, %+v, %v; want %+v:\n%s", code, got, err, want, errOut)
	}
	options.Path = filepath.Join(t.TempDir(), "coild.db")
	testkit.Check(t, os.WriteFile(options.Path, out, 0o600))
	twin, res, err := sqlite.Open(t.Context(), options)
	testkit.Check(t, err)
	testkit.Check(t, twin.Close())
	if res.Fresh || res.SetAside != "" {
		t.Errorf("the copy is opened as %+v", res)
	}

	code, out, errOut = printed(t, "record", "--socket="+d.Socket)
	if code != 0 {
		t.Fatalf("exit code %d: %s", code, errOut)
	}
	if r := testkit.Must(inspection.ParseDatabase(out))(t); r.Node.Name != "n1" || r.Meta["machine_id"] != "m" || r.Schema != r.Newest || len(r.Damage) > 0 {
		t.Errorf("%+v", r)
	}
}
