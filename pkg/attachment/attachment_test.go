package attachment_test

import (
	"fmt"
	"testing"

	"github.com/coil-net/coil/pkg/attachment"
)

func TestKey(t *testing.T) {
	id := attachment.ID{ContainerID: "c1", IfName: "eth0"}
	if got := id.Key(); got != "c1/eth0" {
		t.Errorf("Key: %q", got)
	}
}

// TestEmbeddingStructsPrintWhole fails if ID prints itself.
func TestEmbeddingStructsPrintWhole(t *testing.T) {
	r := struct {
		attachment.ID
		State string
	}{attachment.ID{ContainerID: "c1", IfName: "eth0"}, "pending"}
	if got, want := fmt.Sprint(r), "{{c1 eth0} pending}"; got != want {
		t.Errorf("it prints %s, want %s", got, want)
	}
}
