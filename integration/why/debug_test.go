package why

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/testkit"
)

// What "coild debug" prints of a pod, of its address and of its node is what there is; the socket is root's alone, and TCP has nothing of it.
func TestDebug(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	addrs := f.Ledger.Live()[f.pod]
	a := f.ask(f.pod)
	if len(a.Attachments) != 1 || len(a.Blocks) != 1 || len(a.Problems) > 0 || a.Node.Name != f.Name || a.Node.NotReady != "" || a.Truncated != "" {
		t.Fatalf("%+v", a)
	}
	got := a.Attachments[0]
	if got.ContainerID != f.pod.ContainerID || got.PodUID != f.pod.UID || got.State != "attached" || got.Pool != f.pool || got.Block != a.Blocks[0].Name || got.NetnsGone ||
		got.Netns != f.pod.Path || !slices.Equal(got.Addresses, []string{addrs[0].String(), addrs[1].String()}) {
		t.Errorf("record: %+v", got.Record)
	}
	if wrong := inspection.Wrong(append(got.Objects, a.Host...)); len(wrong) > 0 {
		t.Errorf("wrong: %v", wrong)
	}
	topics := map[inspection.Topic]int{}
	for _, c := range slices.Concat(got.Objects, a.Host) {
		topics[c.Topic]++
	}
	for _, topic := range []inspection.Topic{
		inspection.Veth, inspection.Inside, inspection.Routes, inspection.Ways, inspection.Sysctls, inspection.Guard, inspection.Rules, inspection.Blocks,
	} {
		if topics[topic] == 0 {
			t.Errorf("nothing is said of %s", topic)
		}
	}
	for _, addr := range addrs {
		of := testkit.Must(f.Debug(t.Context(), "address", addr.String()))(t)
		if len(of.Attachments) != 1 || of.Attachments[0].Pod != f.pod.Name || !strings.Contains(of.Way, got.HostLink) || !strings.Contains(of.Way, "table 116") {
			t.Errorf("%s: %+v", addr, of)
		}
	}
	node := testkit.Must(f.Debug(t.Context(), "node"))(t)
	if len(node.Attachments) != 1 || len(node.Blocks) != 1 || node.Blocks[0].Allocated != 1 || node.Blocks[0].Size != 4 || len(node.Attachments[0].Objects) > 0 {
		t.Errorf("node: %+v", node)
	}
	if other := testkit.Must(f.Debug(t.Context(), "pod", "other/pod"))(t); len(other.Attachments) > 0 || len(other.Host) == 0 {
		t.Errorf("a pod that isn't there: %+v", other)
	}

	socket := strings.TrimSuffix(f.Socket(), ".sock") + "-debug.sock"
	if fi, err := os.Stat(socket); err != nil || fi.Mode() != os.ModeSocket|0o600 {
		t.Errorf("%s: %v, %v; want a socket of mode 0600", socket, fi, err)
	}
	for _, path := range []string{"/node", "/pod/" + f.pod.Namespace + "/" + f.pod.Name} {
		if text, err := f.Get(t.Context(), path); err == nil && strings.Contains(text, f.Name) {
			t.Errorf("the metrics' server answers %s: %s", path, text)
		}
	}
}
