package program

import (
	"strings"
	"testing"
	"time"
)

func TestValidateNamesTheFlag(t *testing.T) {
	good := map[string]error{
		"set": Required("COIL_X", "x", "a name"), "least": Within("--n", 1, 1, 3), "most": Within("--n", 3, 1, 3), "protocol": Protocol("--p", 5),
		"positive": Positive("--d", time.Nanosecond), "zero": NotNegative("--d", time.Duration(0)), "absolute": Absolute("--path", "/x"),
	}
	for name, err := range good {
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	bad := map[string]error{
		"COIL_X is not set: it must be a name": Required("COIL_X", "", "a name"),
		"--n=0 is not within 1 and 3":          Within("--n", 0, 1, 3),
		"--n=4 is not within 1 and 3":          Within("--n", 4, 1, 3),
		"--p=256 is not within 5 and 255":      Protocol("--p", 256),
		"--d is 0s: it must be more than 0":    Positive("--d", time.Duration(0)),
		"--d is -1s: it must not be negative":  NotNegative("--d", -time.Second),
		`--path="x" is not an absolute path`:   Absolute("--path", "x"),
	}
	for text, err := range bad {
		if err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%v, want %q", err, text)
		}
	}
	if all, err := Prefixes("--from", []string{"192.0.2.7/24", "x"}); err == nil || !strings.Contains(err.Error(), "--from") {
		t.Errorf("%v, %v", all, err)
	}
}
