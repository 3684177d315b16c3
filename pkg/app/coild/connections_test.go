package coild

import (
	"testing"

	"github.com/coil-net/coil/pkg/node/floating/handover"
	"github.com/coil-net/coil/pkg/node/floating/standby"
	"github.com/coil-net/coil/pkg/peers"
)

// A node accepts all connections that another opens, also when it sees late that others are over.
func TestConnectionsOfOneNode(t *testing.T) {
	opens := handover.Connections + standby.Connections
	if most := opens + opens/2; peers.MostOfOne < most {
		t.Errorf("a node accepts %d connections of one other, which opens %d: it should accept %d", peers.MostOfOne, opens, most)
	}
}
