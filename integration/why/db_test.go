package why

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/coil-net/coil/pkg/app/coilctl"
	"github.com/coil-net/coil/pkg/plan/diagnosis"
	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/testkit"
)

// sql changes the node's record behind coild's back.
func (f *fixture) sql(format string, args ...any) {
	f.t.Helper()
	text := fmt.Sprintf(format, args...)
	if out, err := exec.CommandContext(f.t.Context(), "sqlite3", "-cmd", ".timeout 5000", f.Database(), text).CombinedOutput(); err != nil {
		f.t.Fatalf("%s: %v: %s", text, err, out)
	}
}

// checkDB compares the node's record with the API server, as "coilctl db check" does.
func (f *fixture) checkDB() diagnosis.Diagnosis {
	f.t.Helper()
	e := coilctl.Examiner{Core: f.Core, Coil: f.Coil, Record: func(ctx context.Context, coild *corev1.Pod) (*inspection.Database, error) {
		if coild.Spec.NodeName != f.Name {
			return nil, fmt.Errorf("coild of %s was asked, want that of %s", coild.Spec.NodeName, f.Name)
		}
		return f.Record(ctx)
	}}
	return testkit.Must(e.Database(f.t.Context(), f.Name))(f.t)
}

// A record that coild keeps has no fault. Each one that was changed behind its back has the fault that was made, and no other.
func TestRecords(t *testing.T) {
	for _, c := range []struct {
		name  string
		spoil func(f *fixture)
		wrong string
		says  []string
	}{
		{"sound", func(*fixture) {}, "", nil},
		{"of a pod that doesn't exist", func(f *fixture) {
			f.sql(`UPDATE addresses SET pod_name = 'gone' WHERE container_id = '%s'`, f.pod.ContainerID)
		}, "pods lacking", []string{"/gone (attached)", "no such pod on the node", "crictl"}},
		{"with an address outside of its block", func(f *fixture) {
			f.sql(`UPDATE addresses SET block_offset = block_offset + 1 WHERE container_id = '%s'`, f.pod.ContainerID)
		}, "rows", []string{"isn't address"}},
		{"with a block that isn't the node's", func(f *fixture) {
			f.sql(`INSERT INTO blocks (name, pool, ipv4, since) VALUES ('ghost-0', 'ghost', '203.0.113.0/30', '2026-01-02T03:04:05.000Z')`)
		}, "blocks", []string{"ghost-0", "no AddressBlock of the name"}},
		{"that lacks a pod", func(f *fixture) {
			f.sql(`DELETE FROM addresses WHERE container_id = '%s'`, f.pod.ContainerID)
		}, "lacking", []string{"which the record lacks", "coild records the links that the kernel has"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			f.showCoild(corev1.ConditionTrue)
			f.report(f.pod)
			testkit.Check(t, f.HoldRepairs(true))
			c.spoil(f)
			wants(t, f.checkDB(), c.wrong, c.says...)
		})
	}
}

// A copy of the record has come whole, and is the record: by SQLite's own program, and by the pod's row.
func TestCopyOfRecord(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	file, sum, err := f.CopyRecord(t.Context())
	testkit.Check(t, err)
	sha := sha256.Sum256(file)
	if want := (inspection.Sum{Bytes: int64(len(file)), SHA256: hex.EncodeToString(sha[:])}); sum != want {
		t.Errorf("the sum is %s, want %s", sum, want)
	}
	path := filepath.Join(t.TempDir(), "copy.db")
	testkit.Check(t, os.WriteFile(path, file, 0o600))
	out, err := exec.CommandContext(t.Context(), "sqlite3", "-readonly", path, `PRAGMA integrity_check; SELECT container_id FROM addresses WHERE state = 'attached'`).CombinedOutput()
	if want := "ok\n" + f.pod.ContainerID + "\n"; err != nil || string(out) != want {
		t.Errorf("sqlite3 finds %q in the copy, want %q: %v", out, want, err)
	}
	for _, e := range testkit.Must(os.ReadDir(f.StateDir()))(t) {
		if e.Name() == filepath.Base(f.Database())+"-copy" {
			t.Errorf("%s has been left", e.Name())
		}
	}
}
