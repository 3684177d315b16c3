package assign

import "testing"

// A MAC address of the record counts as unknown if a link can't have it, or if Coil writes it in another way.
func TestMACsOf(t *testing.T) {
	for result, want := range map[string][2]string{
		`{"interfaces":[{"mac":"16:06:e8:31:5c:5e"},{"mac":"16:06:e8:31:5c:5f"}]}`: {"16:06:e8:31:5c:5e", "16:06:e8:31:5c:5f"},
		`{"interfaces":[{"mac":"16:06ze8:31:5c:5e"},{"mac":"16:06:e8:31:5c:5f"}]}`: {"", "16:06:e8:31:5c:5f"},
		`{"interfaces":[{"mac":"16:06:e8:31:5c:5e"},{"mac":"q"}]}`:                 {"16:06:e8:31:5c:5e", ""},
		`{"interfaces":[{"mac":"16:06:E8:31:5c:5e"},{"mac":"16-06-e8-31-5c-5f"}]}`: {},
		`{"interfaces":[{"mac":"17:06:e8:31:5c:5e"},{"mac":"00:00:00:00:00:00"}]}`: {},
		`{"interfaces":[]}`: {},
		``:                  {},
	} {
		if host, pod := macsOf([]byte(result)); host != want[0] || pod != want[1] {
			t.Errorf("%s: %q and %q, want %q", result, host, pod, want)
		}
	}
}
