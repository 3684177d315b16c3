package coild

import "testing"

func TestDebugSocket(t *testing.T) {
	for socket, want := range map[string]string{
		"/run/coild.sock": "/run/coild-debug.sock", "/var/run/a.b/coild": "/var/run/a.b/coild-debug", "/x/a.b.sock": "/x/a.b-debug.sock",
	} {
		if got := (&Options{Socket: socket}).debugSocket(); got != want {
			t.Errorf("%s: %s, want %s", socket, got, want)
		}
	}
}

// Words that ask for nothing are a wrong use, as wrong flags are.
func TestDebugUse(t *testing.T) {
	for _, args := range [][]string{
		{}, {"secrets"}, {"pod"}, {"pod", "a"}, {"address", "x"}, {"--timeout=1s"}, {"pod", "a", "--timeout=1s"}, {"node", "--timeout=0s"}, {"node", "--socket=x"}, {"node", "--x"},
	} {
		if code := debugMain(args); code != 2 {
			t.Errorf("%q: exit code %d, want 2", args, code)
		}
	}
	if code := debugMain([]string{"node", "--socket=" + t.TempDir() + "/coild.sock"}); code != 1 {
		t.Errorf("without coild: exit code %d, want 1", code)
	}
}
