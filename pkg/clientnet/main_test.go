package clientnet

import (
	"flag"
	"os"
	"testing"
)

// Tests that are parallel wait for the kernel most of the time: for the end of readers of what they
// removed, and for packets that mustn't come.
func TestMain(m *testing.M) {
	_ = flag.Set("test.parallel", "8")
	os.Exit(m.Run())
}
