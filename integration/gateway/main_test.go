// Package gateway proves that clients outside of the cluster reach Services by gateway machines, on which coil-lb-agent runs.
//
// The tests connect as clients do, and read the objects of the API. They must not know how the machine sends connections on.
package gateway

import (
	"testing"

	"github.com/coil-net/coil/integration/rig/rigtest"
)

var shared rigtest.Shared

func TestMain(m *testing.M) { shared.Main(m) }
