package inspection

// Sending is what became of packets that coild has sent from a pod. Each is a flow of its own.
type Sending struct {
	Protocol string `json:"protocol"`
	// From is the pod's address, and To where the packets went: with a port, if they had one.
	From    string       `json:"from,omitempty"`
	To      string       `json:"to"`
	Packets []SentPacket `json:"packets"`
	// Links are those that the packets should have taken on the way out, in this order: of the pod and, at last, the host's end of its link.
	Links []LinkTraffic `json:"links"`
	// Flows are those of the packets that the node itself tracks; nil if that isn't known. A node without rules that need it tracks none.
	Flows []Flow `json:"flows,omitzero"`
	// Dropped counts what Coil's table of nftables dropped meanwhile, also of others' packets, by the reason: in the pod, and on the node.
	Dropped DroppedAt `json:"dropped"`
	// Unknown says what couldn't be counted, and why.
	Unknown []string `json:"unknown,omitempty"`
}

// DroppedAt counts packets that were dropped, by the reason.
type DroppedAt struct {
	Pod  map[string]uint64 `json:"pod,omitempty"`
	Node map[string]uint64 `json:"node,omitempty"`
}

// IDs are those of the packets that were sent.
func (s Sending) IDs() (all []uint16) {
	for _, p := range s.Packets {
		if p.NotSent == "" {
			all = append(all, p.ID)
		}
	}
	return all
}

// SentPacket is a packet, and what came back.
type SentPacket struct {
	// ID is the source port, or the identifier of an echo request.
	ID uint16 `json:"id,omitempty"`
	// NotSent is why the kernel refused to send it; empty if it was sent.
	NotSent string `json:"notSent,omitempty"`
	// Resent is how often TCP sent it again.
	Resent int `json:"resent,omitempty"`
	// Answer is such as "echo reply", "RST" or "host unreachable (ICMP type 3, code 1)"; empty if nothing came.
	Answer string `json:"answer,omitempty"`
	// By is who answered, and Arrived says that this was the destination.
	By      string `json:"by,omitempty"`
	Arrived bool   `json:"arrived"`
	// Milliseconds is the time until the answer.
	Milliseconds float64 `json:"milliseconds,omitempty"`
}

// LinkTraffic counts all packets of a link while packets were sent, also those of others.
type LinkTraffic struct {
	InPod bool   `json:"inPod,omitempty"`
	Link  string `json:"link"`
	// Out are those on their way from the pod, and Back those to the pod. Lost are those that the link dropped.
	Out  uint64 `json:"out"`
	Back uint64 `json:"back"`
	Lost uint64 `json:"lost,omitempty"`
}

// Flow is a flow of a packet that was sent, as a kernel tracks it.
type Flow struct {
	ID uint16 `json:"id"`
	// Source is what the packet went on with as its source, with the port if there is one, and Destination where it went.
	Source      string `json:"source"`
	Destination string `json:"destination"`
	// Answered says that packets came back to where the flow is tracked.
	Answered bool `json:"answered"`
}

// More are the counts that have grown since earlier ones.
func More(now, before map[string]uint64) map[string]uint64 {
	more := map[string]uint64{}
	for name, n := range now {
		if n > before[name] {
			more[name] = n - before[name]
		}
	}
	return more
}
