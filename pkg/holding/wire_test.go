package holding_test

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/holding"
)

var (
	key     = []byte("a key of thirty-two bytes, more or less")
	message = holding.Message{
		Kind: holding.Vote, Stamp: holding.Stamp{Life: 1<<64 - 1, Sent: time.Hour}, Echo: holding.Stamp{Life: 7, Sent: -time.Second},
		Grant: true, About: "n3", Round: time.Minute, Silent: true,
	}
)

func seal(tb testing.TB, key []byte) []byte {
	tb.Helper()
	datagram, err := holding.Seal(key, "n1", "n2", message)
	if err != nil {
		tb.Fatal(err)
	}
	return datagram
}

func TestSeal(t *testing.T) {
	for name, keys := range map[string][][]byte{
		"the key":            {key},
		"a key and the next": {[]byte("another"), key},
	} {
		from, got, err := holding.Open(keys, "n2", seal(t, key))
		if err != nil || from != "n1" || got != message {
			t.Errorf("%s: from %q: %+v, error %v; want %+v", name, from, got, err, message)
		}
	}
}

func TestOpenRefuses(t *testing.T) {
	good := seal(t, key)
	other := bytes.Clone(good)
	other[0]++
	for name, c := range map[string]struct {
		keys     [][]byte
		self     string
		datagram []byte
		says     string
	}{
		"another key":     {[][]byte{[]byte("another")}, "n2", good, "knows the key"},
		"no key":          {nil, "n2", good, "knows the key"},
		"another node":    {[][]byte{key}, "n3", good, "is for n2"},
		"another version": {[][]byte{key}, "n2", other, "knows the key"},
		"empty":           {[][]byte{key}, "n2", nil, "knows the key"},
		"cut":             {[][]byte{key}, "n2", good[:40], "knows the key"},
		"long":            {[][]byte{key}, "n2", make([]byte, holding.MaxDatagram+1), "knows the key"},
	} {
		if _, m, err := holding.Open(c.keys, c.self, c.datagram); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %+v, error %v, want one that says %q", name, m, err, c.says)
		}
	}
}

func TestSealRefusesLongMessages(t *testing.T) {
	m := message
	m.About = strings.Repeat("n", holding.MaxDatagram)
	if _, err := holding.Seal(key, "n1", "n2", m); err == nil || !strings.Contains(err.Error(), "at most 1200") {
		t.Errorf("error %v", err)
	}
}

// The longest names of nodes fit.
func TestSealLongNames(t *testing.T) {
	long := func(letter string) string { return strings.Repeat(letter, 253) }
	m := message
	m.About = long("c")
	if _, err := holding.Seal(key, long("a"), long("b"), m); err != nil {
		t.Error(err)
	}
}

// FuzzOpen: no datagram but those that were sealed with the key, for this node, is read.
func FuzzOpen(f *testing.F) {
	good := seal(f, key)
	f.Add(good, 0)
	f.Add(good[:len(good)-1], 5)
	f.Add([]byte{1}, 3)
	f.Fuzz(func(t *testing.T, datagram []byte, flip int) {
		if from, m, err := holding.Open([][]byte{key}, "n2", datagram); err == nil {
			again, err := holding.Seal(key, from, "n2", m)
			if err != nil || len(again) == 0 {
				t.Errorf("a message that was read can't be sealed: %v", err)
			}
		}
		bad := bytes.Clone(good)
		bit := (flip & 0x7fffffff) % (8 * len(bad))
		bad[bit/8] ^= 1 << (bit % 8)
		if _, m, err := holding.Open([][]byte{key}, "n2", bad); err == nil {
			t.Errorf("bit %d was changed, and it is read: %+v", bit, m)
		}
	})
}
