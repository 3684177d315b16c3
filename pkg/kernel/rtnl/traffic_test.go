package rtnl

import (
	"encoding/binary"
	"errors"
	"testing"

	"golang.org/x/sys/unix"
)

// The counts of a link are read from where the kernel has them, and an answer that is cut short is an error.
func TestParseTraffic(t *testing.T) {
	var stats []byte
	for i := range uint64(24) {
		stats = binary.NativeEndian.AppendUint64(stats, 100+i)
	}
	body := func(stats []byte) []byte {
		return append(make([]byte, unix.SizeofIfInfomsg), AppendAttribute(nil, unix.IFLA_STATS64, stats)...)
	}
	got, err := parseTraffic(body(stats))
	if want := (Traffic{In: 100, Out: 101, Lost: 104 + 105 + 106 + 107}); err != nil || got != want {
		t.Errorf("%+v, %v; want %+v", got, err, want)
	}
	for _, b := range [][]byte{nil, body(nil), body(stats[:63]), body(stats)[:unix.SizeofIfInfomsg+3]} {
		if got, err := parseTraffic(b); !errors.Is(err, errMalformed) {
			t.Errorf("%d bytes: %+v, %v", len(b), got, err)
		}
	}
	if got := (Traffic{In: 5, Out: 7, Lost: 1}).Since(Traffic{In: 2, Out: 9}); got != (Traffic{In: 3, Lost: 1}) {
		t.Errorf("since a count of another link: %+v", got)
	}
}
