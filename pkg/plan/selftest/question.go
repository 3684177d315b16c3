package selftest

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strings"
)

// Port is where pods of a selftest serve, TCP and UDP, unless another one is chosen.
const Port = 9380

// Kind is how a pod asks another one.
type Kind string

// The kinds of questions.
const (
	TCP Kind = "tcp"
	UDP Kind = "udp"
	// MTU is a datagram as long as the link takes, and one that is a byte longer.
	MTU Kind = "mtu"
)

// Question is what a pod asks, and whom.
type Question struct {
	Kind Kind
	To   netip.AddrPort
}

// String is the question as a word of the command line, such as "udp:10.0.0.1:9380".
func (q Question) String() string { return string(q.Kind) + ":" + q.To.String() }

// Parse reads a question from a word of the command line.
func Parse(word string) (Question, error) {
	kind, to, _ := strings.Cut(word, ":")
	q := Question{Kind: Kind(kind)}
	if q.Kind != TCP && q.Kind != UDP && q.Kind != MTU {
		return q, fmt.Errorf("%q isn't tcp:, udp: or mtu: with ADDRESS:PORT", word)
	}
	var err error
	if q.To, err = netip.ParseAddrPort(to); err != nil {
		return q, fmt.Errorf("%q: %w", word, err)
	}
	if q.To.Port() == 0 || q.To.Addr().Zone() != "" {
		return q, fmt.Errorf("%q has no port, or a zone", word)
	}
	q.To = netip.AddrPortFrom(q.To.Addr().Unmap(), q.To.Port())
	return q, nil
}

// Reply is what a pod says to who asks it.
type Reply struct {
	// Token is that of the question.
	Token string `json:"token,omitempty"`
	// Name is the pod's.
	Name string `json:"name"`
	// Source is where the question came from, as the pod saw it.
	Source netip.AddrPort `json:"source"`
	// Bytes is how long the datagram was.
	Bytes int `json:"bytes,omitempty"`
}

// Request is the least length of a datagram that is answered: a reply is never longer, so that nobody can use pods to multiply what they send.
const Request = 512

// Answer is what has become of a question.
type Answer struct {
	Question string `json:"question"`
	// Reached says that something has answered.
	Reached bool `json:"reached"`
	// Error says why nothing has.
	Error string `json:"error,omitempty"`
	// Name and Source are those of the reply; they are empty if no pod of a selftest has answered.
	Name   string         `json:"name,omitempty"`
	Source netip.AddrPort `json:"source,omitzero"`
	// Link is the one by which a datagram left, for MTU.
	Link *Link `json:"link,omitempty"`
}

// Link is a link of a pod, and which datagrams it takes.
type Link struct {
	Name string `json:"name"`
	MTU  int    `json:"mtu"`
	// Path is the MTU of the path, as far as the kernel knows.
	Path int `json:"path,omitempty"`
	// Longer says that a datagram was sent that is a byte longer than the MTU.
	Longer bool `json:"longer,omitempty"`
}

// AnswersLimit is the most bytes of answers that a pod prints.
const AnswersLimit = 1 << 20

// ParseAnswers reads what a pod has printed.
func ParseAnswers(text []byte) ([]Answer, error) {
	var all []Answer
	if err := json.Unmarshal(text, &all); err != nil {
		return nil, fmt.Errorf("read the answers of a pod: %w", err)
	}
	if all == nil {
		return nil, errors.New("a pod has printed no list of answers")
	}
	return all, nil
}
