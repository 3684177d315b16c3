package diagnosis

import (
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/inspection"
)

// TraceFacts are what is known of a pod's packets to a destination.
type TraceFacts struct {
	Pod *corev1.Pod
	To  netip.AddrPort // the port is 0 if none was named
	// Answer is coild's to "way", nil without one, and Unanswered says why.
	Answer     *inspection.Answer
	Unanswered string
	// Routers are those of the Egresses that the pod uses, with their answers to "way".
	Routers []AskedRouter
}

// PathHop is a hop of a path.
type PathHop struct {
	// Where is such as "pod shop/cart-0", "node n1" or "router internet/nat-0".
	Where string `json:"where"`
	inspection.Hop
	// Count is how many packets were seen there, if some were sent.
	Count *HopCount `json:"count,omitempty"`
	// Note says more, for people.
	Note string `json:"note,omitempty"`
}

// Path is how packets of a pod go to a destination.
type Path struct {
	// Subject is such as "From Pod shop/cart-0 to 203.0.113.5".
	Subject string    `json:"subject"`
	Hops    []PathHop `json:"hops"`
	// Sources are the addresses that the destination may see, as far as Coil decides that: one of each router that the packets may go by.
	Sources []string `json:"sources,omitempty"`
	// Lost says why packets get lost; empty if they don't, as far as is known.
	Lost string `json:"lost,omitempty"`
	// Unknown says what couldn't be found out.
	Unknown []string `json:"unknown,omitempty"`
	// Sending is what became of packets that were sent.
	Sending *PathSending `json:"sending,omitempty"`
}

// Trace follows the packets of a pod.
func Trace(f TraceFacts) Path {
	to := f.To.Addr().String()
	if f.To.Port() != 0 {
		to = f.To.String()
	}
	name := f.Pod.Namespace + "/" + f.Pod.Name
	p := Path{Subject: fmt.Sprintf("From Pod %s to %s", name, to), Hops: []PathHop{}}
	if f.Answer == nil {
		p.Unknown = append(p.Unknown, "coild of node "+f.Pod.Spec.NodeName+" doesn't say how packets go: "+f.Unanswered)
		return p
	}
	p.Unknown = append(p.Unknown, f.Answer.Problems...)
	if len(f.Answer.Hops) == 0 {
		p.Unknown = append(p.Unknown, "coild of node "+f.Pod.Spec.NodeName+" knows no network of the pod, or is of an earlier version")
		return p
	}
	var ends []string
	for _, h := range f.Answer.Hops {
		where := "node " + f.Answer.Node.Name
		if h.InPod {
			where = "pod " + name
		}
		hop := PathHop{Where: where, Hop: h}
		if ends = append(ends, h.Tunnels...); len(h.Tunnels) > 0 {
			hop.Note = "tunnel to " + plan.Enumerate(h.Tunnels)
		}
		if h.InTunnel {
			hop.Note = "the outer packet"
		}
		p.Hops = append(p.Hops, hop)
		if h.Dropped != "" {
			p.Lost = where + ": " + h.Dropped
			return p
		}
	}
	if len(ends) == 0 {
		p.source(f.Answer.Hops[0].From)
		return p
	}
	p.routers(f, ends)
	return p
}

// source adds an address that the destination may see.
func (p *Path) source(a string) {
	if a != "" && !slices.Contains(p.Sources, a) {
		p.Sources = append(p.Sources, a)
	}
}

// routers adds the routers that the tunnels lead to: those that have the address of an end, or all of the Egress if the end is an address of its Service.
func (p *Path) routers(f TraceFacts, ends []string) {
	at := slices.DeleteFunc(slices.Clone(f.Routers), func(r AskedRouter) bool {
		return !slices.ContainsFunc(r.Pod.Status.PodIPs, func(ip corev1.PodIP) bool { return slices.Contains(ends, ip.IP) })
	})
	byService := len(at) == 0
	if byService {
		at = f.Routers
	}
	if len(at) == 0 {
		p.Unknown = append(p.Unknown, "no router of the pod's Egresses is known that has "+plan.Enumerate(ends))
	}
	for _, r := range at {
		where := r.where()
		if r.Answer == nil || r.Answer.Way == nil {
			p.Unknown = append(p.Unknown, where+" doesn't say how packets go on: "+r.Unanswered)
			continue
		}
		way := r.Answer.Way
		hop := PathHop{Where: where, Hop: inspection.Hop{From: way.Source, To: way.Destination, Route: way.Route}, Note: way.Why}
		if len(at) > 1 {
			hop.Note = fmt.Sprintf("one of %d routers", len(at))
			if byService {
				hop.Note += ", which the Service proxy chooses"
			}
			if way.Why != "" {
				hop.Note += "; " + way.Why
			}
		}
		if way.Source == "" {
			hop.Dropped = way.Why
			if p.Lost == "" {
				p.Lost = where + ": " + way.Why
			}
		}
		p.source(way.Source)
		p.Hops = append(p.Hops, hop)
	}
}
