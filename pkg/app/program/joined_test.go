package program

import (
	"slices"
	"testing"
)

func TestJoined(t *testing.T) {
	var ran []string
	j := Joined{}
	for _, name := range []string{"a", "b"} {
		j[name] = func(args []string) int {
			ran = append(append(ran, name), args...)
			return 7
		}
	}
	for _, tt := range []struct {
		args []string
		code int
		ran  []string
	}{
		{[]string{"/b", "-x"}, 7, []string{"b", "-x"}},
		{[]string{"a"}, 7, []string{"a"}},
		{[]string{"/c", "a"}, 2, nil},
		{nil, 2, nil},
	} {
		ran = nil
		if code := j.Main(tt.args); code != tt.code || !slices.Equal(ran, tt.ran) {
			t.Errorf("%q: code %d, ran %q; want %d, %q", tt.args, code, ran, tt.code, tt.ran)
		}
	}
}
