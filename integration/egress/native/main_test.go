// Package native proves what clients of an Egress with floating addresses send, with all programs, on this machine's kernel.
//
// Tunnels are VXLAN links in place of FoU (build tag coil_vxlan). It asks the network outside. It must not know how programs agree.
package native

import (
	"testing"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/integration/rig/rigtest"
)

// shared is the rig of all tests.
var shared = rigtest.Shared{Options: rig.Options{Tags: []string{rig.StandInTunnels}}}

func TestMain(m *testing.M) { shared.Main(m) }
