package main

import (
	"testing"

	"github.com/coil-net/coil/integration/lab/vm"
	"github.com/coil-net/coil/integration/lab/vm/vmtest"
	"github.com/coil-net/coil/pkg/testkit"
)

// Packets pass by all paths that are compared.
func TestPaths(t *testing.T) {
	if !vmtest.Reexec(t, vm.Options{Kernel: "6.12"}, modules...) {
		return
	}
	testkit.Check(t, prepare(t.Context()))
	c := testkit.Must(newCoil(t.Context()))(t)
	testkit.Must(c.resize(t.Context(), 2))(t)
	for _, f := range families {
		for via := range paths {
			if _, err := in(t.Context(), senders[via], "busybox", "ping", "-c", "1", "-W", "5", targets[f][via].String()); err != nil {
				t.Errorf("from %s: %v", senders[via], err)
			}
		}
	}
}
