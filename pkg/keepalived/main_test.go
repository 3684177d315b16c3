package keepalived

import (
	"flag"
	"os"
	"testing"
)

// Tests that are parallel wait for elections most of the time.
func TestMain(m *testing.M) {
	_ = flag.Set("test.parallel", "4")
	os.Exit(m.Run())
}
