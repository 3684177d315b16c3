package podnet_test

import (
	"flag"
	"os"
	"testing"
)

// Tests that are parallel wait for the kernel most of the time, which ends readers of what they removed.
func TestMain(m *testing.M) {
	_ = flag.Set("test.parallel", "6")
	os.Exit(m.Run())
}
