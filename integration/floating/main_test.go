// Package floating proves that nodes hold floating addresses: that a host outside reaches an address at one node at a time, whichever
// nodes, programs and networks fail.
//
// It asks the host, the kernel and the API server. It must not know by which messages nodes agree.
package floating

import (
	"testing"

	"github.com/coil-net/coil/integration/rig/rigtest"
)

// shared is the rig of all tests. They wait most of the time.
var shared = rigtest.Shared{Parallel: 4}

func TestMain(m *testing.M) { shared.Main(m) }
