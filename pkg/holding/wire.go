package holding

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
)

// MaxDatagram is how many bytes a datagram has at most, so that no link divides it.
const MaxDatagram = 1200

// wire is a message on its way. Its text begins a datagram with wireVersion and the HMAC (RFC 2104, SHA-256) of what follows.
type wire struct {
	From    string  `json:"from"`
	To      string  `json:"to"`
	Message Message `json:"message"`
}

const wireVersion = 1

// errForeign says no more: whoever sends such datagrams needn't know how far they came.
var errForeign = errors.New("the datagram isn't of a node that knows the key")

// Seal returns the datagram of a message from one node to another, which all who know the key can read and make.
func Seal(key []byte, from, to string, m Message) ([]byte, error) {
	text, err := json.Marshal(wire{from, to, m})
	if err != nil {
		return nil, fmt.Errorf("encode a message: %w", err)
	}
	datagram := append(sum(key, text), text...)
	if len(datagram) > MaxDatagram {
		return nil, fmt.Errorf("a message of %d bytes to %s is too long: at most %d are sent", len(datagram), to, MaxDatagram)
	}
	return datagram, nil
}

// Open returns the message of a datagram for the node self, and its sender. Any of the keys will do, so that a key can be changed
// while nodes speak.
func Open(keys [][]byte, self string, datagram []byte) (from string, m Message, err error) {
	const head = 1 + sha256.Size
	if len(datagram) < head || len(datagram) > MaxDatagram {
		return "", Message{}, errForeign
	}
	text := datagram[head:]
	known := false
	for _, key := range keys {
		known = hmac.Equal(datagram[:head], sum(key, text)) || known
	}
	if !known {
		return "", Message{}, errForeign
	}
	var w wire
	if err := json.Unmarshal(text, &w); err != nil {
		return "", Message{}, fmt.Errorf("decode a message: %w", err)
	}
	if w.To != self {
		return "", Message{}, fmt.Errorf("the message of %s is for %s", w.From, w.To)
	}
	return w.From, w.Message, nil
}

// sum returns the first bytes of a datagram.
func sum(key, text []byte) []byte {
	h := hmac.New(sha256.New, key)
	h.Write([]byte{wireVersion})
	h.Write(text)
	return h.Sum([]byte{wireVersion})
}
