package assign

import "testing"

// A MAC address of the record that is none counts as unknown.
func TestMACsOf(t *testing.T) {
	for result, want := range map[string][2]string{
		`{"interfaces":[{"mac":"16:06:e8:31:5c:5e"},{"mac":"16:06:e8:31:5c:5f"}]}`: {"16:06:e8:31:5c:5e", "16:06:e8:31:5c:5f"},
		`{"interfaces":[{"mac":"16:06ze8:31:5c:5e"},{"mac":"16:06:e8:31:5c:5f"}]}`: {"", "16:06:e8:31:5c:5f"},
		`{"interfaces":[{"mac":"16:06:e8:31:5c:5e"},{"mac":"q"}]}`:                 {"16:06:e8:31:5c:5e", ""},
		`{"interfaces":[]}`: {},
		``:                  {},
	} {
		if host, pod := macsOf([]byte(result)); host != want[0] || pod != want[1] {
			t.Errorf("%s: %q and %q, want %q", result, host, pod, want)
		}
	}
}
