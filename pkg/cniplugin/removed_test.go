package cniplugin

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/delqueue"
)

// A plugin that coild cleanup has overtaken leaves nothing behind, and no record of others is lost.
func TestDelAfterTheRemovalOfCoil(t *testing.T) {
	n := newNode(t)
	n.plugin.file = filepath.Join(t.TempDir(), "coil")
	if err := n.do(verbDel, ""); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(n.queue); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the queue is left: %v", err)
	}
	other := delqueue.Record{ID: attachment.ID{ContainerID: "other", IfName: "eth0"}}
	if err := delqueue.New(n.queue).Add(other); err != nil {
		t.Fatal(err)
	}
	if err := n.do(verbDel, ""); err != nil {
		t.Fatal(err)
	}
	if got := n.queued(t); len(got) != 1 || got[0].ID != other.ID {
		t.Errorf("queue is %+v, want the record that was there", got)
	}
}
