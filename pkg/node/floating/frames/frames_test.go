package frames

import (
	"bytes"
	"net/netip"
	"slices"
	"testing"

	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/node/floating"
	"github.com/coil-net/coil/pkg/node/floating/floatingtest"
)

func address() floating.Address {
	return floating.Address{Address: ipam.Address{IPv4: netip.MustParseAddr("198.51.100.7"), IPv6: netip.MustParseAddr("2001:db8::7")}}
}

// The table keeps an order of addresses within a frame, and refuses all else.
func TestFrames(t *testing.T) {
	a := address()
	var want []conntrack.Flow
	var b []byte
	for i := range FlowsPerFrame {
		want = append(want, floatingtest.Flow(a, i))
		b = AppendFlow(b, want[i])
	}
	if len(b) > MostPayload {
		t.Fatalf("a frame has %d bytes", len(b))
	}
	if got, err := ParseFlows(b); err != nil || !slices.Equal(got, want) {
		t.Fatalf("%d flows, %v, want %d", len(got), err, len(want))
	}
	for name, bad := range map[string][]byte{
		"too many": AppendFlow(slices.Clone(b), want[0]), "cut off": b[:len(b)-1], "one byte": {6}, "another version": append([]byte{6, 5}, b...),
	} {
		if _, err := ParseFlows(bad); err == nil {
			t.Errorf("%s is taken", name)
		}
	}
	var buffer []byte
	for name, bad := range map[string][]byte{"empty": {0, 0, 0, 0, 1}, "too long": {0, 1, 0, 2, 1}, "cut off": {0, 0, 0, 5, 1, 1}} {
		if _, _, err := Read(bytes.NewReader(bad), &buffer); err == nil {
			t.Errorf("a frame that is %s is taken", name)
		}
	}
}

// Whatever comes, frames are read without a panic and in bounded memory, and flows that are understood are those that were written.
func FuzzFrames(f *testing.F) {
	a := address()
	var b bytes.Buffer
	_ = Write(&b, Opened, AppendFlow(AppendFlow(nil, floatingtest.Flow(a, 1)), floatingtest.Flow(a, 2)))
	f.Add(b.Bytes())
	f.Add([]byte{0, 0, 0, 1, 4})
	f.Fuzz(func(t *testing.T, data []byte) {
		r := bytes.NewReader(data)
		var buffer []byte
		for {
			_, payload, err := Read(r, &buffer)
			if cap(buffer) > MostPayload {
				t.Fatalf("the buffer has %d bytes", cap(buffer))
			}
			if err != nil {
				return
			}
			flows, err := ParseFlows(payload)
			if err != nil {
				continue
			}
			var again []byte
			for _, f := range flows {
				again = AppendFlow(again, f)
			}
			if back, err := ParseFlows(again); err != nil || !slices.Equal(back, flows) {
				t.Fatalf("%v is %v after it was written, %v", flows, back, err)
			}
		}
	})
}
