// Package neighbours proves that hosts on a node's links reach addresses of pools with announce: Neighbor, by ARP and NDP alone: on links
// of all kinds, from ADD to DEL, and from one node to another.
//
// It asks the hosts, and the kernel's own tools. It must not know how the node answers.
package neighbours

import (
	"testing"

	"github.com/coil-net/coil/integration/rig/rigtest"
)

// shared is the rig of all tests, which wait most of the time. Each has a pool of its own. In the machine of TestLinksOfModules it is the number
// that matters: its kinds of links are tested at once.
var shared = rigtest.Shared{Parallel: 6}

func TestMain(m *testing.M) { shared.Main(m) }
