package leading

import (
	"strings"
	"testing"
)

func TestIdentitiesDiffer(t *testing.T) {
	t.Setenv("COIL_POD_NAME", "pod")
	a, errA := newIdentity()
	b, errB := newIdentity()
	if errA != nil || errB != nil || a == b || !strings.HasPrefix(a, "pod_") {
		t.Errorf("identities are %q (%v) and %q (%v)", a, errA, b, errB)
	}
}
