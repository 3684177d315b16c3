package egress

import "testing"

// Words that ask for nothing are a wrong use, as wrong flags are.
func TestDebugUse(t *testing.T) {
	for _, args := range [][]string{
		{}, {"secrets"}, {"pod"}, {"pod", "a"}, {"client", "x"}, {"router", "x"}, {"--timeout=1s"}, {"client", "x", "--timeout=1s"}, {"router", "--timeout=0s"}, {"router", "--debug-socket=x"}, {"router", "--x"},
	} {
		if code := debugMain(args); code != 2 {
			t.Errorf("%q: exit code %d, want 2", args, code)
		}
	}
	if code := debugMain([]string{"--help"}); code != 0 {
		t.Errorf("help: exit code %d, want 0", code)
	}
	if code := debugMain([]string{"router", "--debug-socket=" + t.TempDir() + "/debug.sock"}); code != 1 {
		t.Errorf("without a router: exit code %d, want 1", code)
	}
}
