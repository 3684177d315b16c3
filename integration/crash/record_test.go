package crash

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/pkg/testkit"
)

// sidecars are the files of the record.
var sidecars = []string{"", "-wal", "-shm"}

// damage is what happens to a record while coild is away.
type damage struct {
	name string
	do   func(c *cluster, n *rig.Node) error
	// rebuilt is the reason that the Event about a new record has; empty if the record
	// can be used.
	rebuilt string
	// forgets says that the record is one of an earlier time, which nobody can tell:
	// addresses that were freed since may not rest.
	forgets bool
	// loses says that the last transactions may be lost, which nobody can tell either: a
	// pod whose ADD looks as if it had never ended loses its network.
	loses bool
}

// onFile changes the content of one of the files.
func onFile(suffix string, change func([]byte) []byte) func(*cluster, *rig.Node) error {
	return func(_ *cluster, n *rig.Node) error {
		path := n.Database() + suffix
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(path, change(content), 0o600)
	}
}

func truncated(size int) func([]byte) []byte {
	return func(b []byte) []byte { return b[:min(size, len(b))] }
}

// statement changes the record as another program would.
func statement(sql string) func(*cluster, *rig.Node) error {
	return func(_ *cluster, n *rig.Node) error {
		if out, err := exec.Command("sqlite3", n.Database(), sql).CombinedOutput(); err != nil {
			return fmt.Errorf("sqlite3: %w: %s", err, out)
		}
		return nil
	}
}

// checkpointed moves the log into the file before a change.
func checkpointed(then func(*cluster, *rig.Node) error) func(*cluster, *rig.Node) error {
	return func(c *cluster, n *rig.Node) error {
		return errors.Join(statement("PRAGMA wal_checkpoint(TRUNCATE)")(c, n), then(c, n))
	}
}

// replaced puts a copy of other files in place of the record.
func replaced(from func(c *cluster, n *rig.Node) string) func(*cluster, *rig.Node) error {
	return func(c *cluster, n *rig.Node) error {
		source := from(c, n)
		if err := loseRecord(n); err != nil {
			return err
		}
		for _, suffix := range sidecars {
			content, err := os.ReadFile(source + suffix)
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return err
			}
			if err := os.WriteFile(n.Database()+suffix, content, 0o600); err != nil {
				return err
			}
		}
		return nil
	}
}

func damages() []damage {
	ds := []damage{
		{name: "none", do: func(*cluster, *rig.Node) error { return nil }},
		{name: "record removed", do: func(_ *cluster, n *rig.Node) error { return loseRecord(n) }},
		{name: "file removed, log left", do: func(_ *cluster, n *rig.Node) error { return os.Remove(n.Database()) }, rebuilt: "Missing"},
		{name: "file empty", do: onFile("", truncated(0)), rebuilt: "*"},
		{name: "file of 100 bytes", do: onFile("", truncated(100)), rebuilt: "*"},
		{name: "file of 3 pages", do: checkpointed(onFile("", truncated(3*4096))), rebuilt: "Damaged"},
		{name: "file half a page short", do: checkpointed(func(c *cluster, n *rig.Node) error {
			st, err := os.Stat(n.Database())
			if err != nil {
				return err
			}
			return onFile("", truncated(int(st.Size())-2048))(c, n)
		}), rebuilt: "Damaged"},
		{name: "zeros", do: onFile("", func(b []byte) []byte { return make([]byte, len(b)) }), rebuilt: "*"},
		{name: "text", do: checkpointed(onFile("", func([]byte) []byte { return slices.Repeat([]byte("not a database\n"), 4000) })), rebuilt: "Damaged"},
		{name: "log removed", do: func(_ *cluster, n *rig.Node) error {
			return errors.Join(os.Remove(n.Database()+"-wal"), os.Remove(n.Database()+"-shm"))
		}, forgets: true, rebuilt: "*"},
		{name: "log truncated", do: onFile("-wal", truncated(9000)), forgets: true, loses: true, rebuilt: "*"},
		{name: "index zeroed", do: onFile("-shm", func(b []byte) []byte { return make([]byte, len(b)) })},
		{name: "of another node", do: replaced(func(c *cluster, _ *rig.Node) string {
			other := c.node(rig.NodeOptions{})
			c.podsOf(other, 3)
			other.Coild.Kill()
			return other.Database()
		}), rebuilt: "OtherNode"},
		// The clock since boot isn't a new one here, so that addresses seem to have rested.
		{name: "of another boot", do: func(_ *cluster, n *rig.Node) error { return n.NewBootID() }, forgets: true},
		{name: "of an earlier Node of the name", do: func(c *cluster, n *rig.Node) error {
			return errors.Join(n.DeleteObject(c.t.Context()), n.CreateObject(c.t.Context()))
		}},
		{name: "newer schema", do: statement("PRAGMA user_version = 99"), rebuilt: "NewerSchema"},
		{name: "schema without version", do: statement("PRAGMA user_version = 0"), rebuilt: "Damaged"},
		{name: "of another program", do: statement("PRAGMA application_id = 7"), rebuilt: "OtherProgram"},
		{name: "row of an address missing", do: statement("DELETE FROM addresses WHERE address_id = (SELECT min(address_id) FROM addresses WHERE state = 'attached')")},
		{name: "container of a row changed", do: statement("UPDATE addresses SET container_id = 'x' WHERE address_id = (SELECT min(address_id) FROM addresses WHERE state = 'attached')")},
		{name: "of a moment in an ADD", do: statement("UPDATE addresses SET state = 'pending', host_ifindex = 0, host_ifname = '', result = NULL WHERE address_id = (SELECT min(address_id) FROM addresses WHERE state = 'attached')")},
		{name: "addresses of two rows exchanged", do: statement(exchange)},
		{name: "capitals in a MAC address", do: statement(macs("upper(json_extract(result, '$.interfaces[0].mac'))"))},
		{name: "MAC address of a group", do: statement(macs("'01:00:5e:00:00:01'"))},
		{name: "another MAC address", do: statement(macs("'02:00:5e:00:00:01'"))},
		{name: "index of a link changed", do: statement("UPDATE addresses SET host_ifindex = (SELECT max(host_ifindex) FROM addresses), host_ifname = 'vethx' WHERE address_id = (SELECT min(address_id) FROM addresses WHERE state = 'attached')")},
	}
	for seed := range uint64(testkit.CrashForm.Times(1, 25)) {
		for _, suffix := range sidecars {
			ds = append(ds, damage{
				name: fmt.Sprintf("bytes flipped in coild.db%s, seed %d", suffix, seed), rebuilt: "*", forgets: suffix == "-wal", loses: suffix == "-wal",
				do: onFile(suffix, func(b []byte) []byte { return flip(b, seed) }),
			})
		}
	}
	return ds
}

// exchange gives two attachments each other's address.
const exchange = `
CREATE TEMP TABLE two AS SELECT * FROM addresses WHERE state = 'attached' ORDER BY address_id LIMIT 2;
UPDATE addresses SET container_id = container_id || 'x' WHERE address_id IN (SELECT address_id FROM two);
UPDATE addresses SET container_id = (SELECT container_id FROM two WHERE two.address_id <> addresses.address_id)
 WHERE address_id IN (SELECT address_id FROM two);`

// macs changes the MAC address that the record has of the host's end of each link.
func macs(to string) string {
	return "UPDATE addresses SET result = json_set(result, '$.interfaces[0].mac', " + to + ") WHERE state = 'attached'"
}

// flip changes a few bits.
func flip(b []byte, seed uint64) []byte {
	r := rand.New(rand.NewPCG(seed, 1))
	for range 1 + r.IntN(12) {
		if len(b) > 0 {
			b[r.IntN(len(b))] ^= 1 << r.IntN(8)
		}
	}
	return b
}

// Whatever happens to the record: coild serves again, no running pod loses its
// network, and no address is given twice.
func TestDamagedRecord(t *testing.T) {
	t.Parallel()
	for _, d := range damages() {
		t.Run(d.name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t, 3)
			n := c.node(rig.NodeOptions{})
			pods := c.podsOf(n, 5)
			for range 2 {
				c.check(end(t.Context(), c.pod(n)))
			}
			c.clean()
			n.Coild.Kill()
			c.check(d.do(c, n))
			c.check(n.Start(t.Context()))
			if d.loses {
				pods = c.kept(pods)
			}
			c.works(n, pods...)
			if !d.forgets {
				c.rested()
			}
			c.rebuilt(n, d.rebuilt)
			for _, s := range pods {
				c.check(end(t.Context(), s))
			}
			c.blocksGoBack()
		})
	}
}

// kept ends the pods that have lost their network, and returns the others.
func (c *cluster) kept(pods []*rig.Sandbox) []*rig.Sandbox {
	c.t.Helper()
	var kept []*rig.Sandbox
	for _, s := range pods {
		if err := s.Check(c.t.Context()); err != nil {
			c.t.Logf("lost with the log: %v", err)
			c.check(end(c.t.Context(), s))
			continue
		}
		kept = append(kept, s)
	}
	return kept
}

// rebuilt reports when there is no file that was set aside and no Event that says why,
// or when there are but needn't be; "*" is either.
func (c *cluster) rebuilt(n *rig.Node, reason string) {
	c.t.Helper()
	if reason == "*" {
		return
	}
	aside, err := filepath.Glob(n.Database() + ".*")
	if err != nil {
		c.t.Fatal(err)
	}
	if reason == "" {
		if len(aside) > 0 {
			c.t.Errorf("set aside was %q", aside)
		}
		return
	}
	if len(aside) == 0 {
		c.t.Error("no file was set aside")
	}
	testkit.Eventually(c.t, 10*time.Second, "Event about the new record", func() error {
		events, err := c.Core.EventsV1().Events(metav1.NamespaceAll).List(c.t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		var notes []string
		for _, e := range events.Items {
			if e.Regarding.UID == n.UID() {
				if e.Reason == "DatabaseRebuilt" {
					return nil
				}
				notes = append(notes, e.Reason+": "+e.Note)
			}
		}
		return fmt.Errorf("the Node has only %q", notes)
	})
}

// A record of yesterday is worse than none: what it says was true once.
func TestOlderRecord(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3)
	n := c.node(rig.NodeOptions{})
	before := c.podsOf(n, 4)
	stays := before[0]
	n.Coild.Kill()
	c.check(statement("PRAGMA wal_checkpoint(TRUNCATE)")(c, n))
	old, err := os.ReadFile(n.Database())
	c.check(err, n.Start(t.Context()))
	for _, s := range before[1:] {
		c.check(end(t.Context(), s))
	}
	// Others get their addresses.
	c.check(testkit.Within(t.Context(), 3*coolDown, func() error {
		if free, err := n.Blocks(t.Context()); err != nil || len(free) > 0 && free[0].Status.Cooling > 0 {
			return fmt.Errorf("addresses cool still: %v", err)
		}
		return nil
	}))
	time.Sleep(coolDown)
	after := c.podsOf(n, 8)
	c.clean()
	n.Coild.Kill()
	c.check(loseRecord(n), os.WriteFile(n.Database(), old, 0o600))
	c.check(n.Start(t.Context()))
	c.works(n, append(after, stays)...)
}
