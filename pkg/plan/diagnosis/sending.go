package diagnosis

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/inspection"
)

// SendFacts are what is known of packets that were sent from a pod. Its TraceFacts were read before.
type SendFacts struct {
	TraceFacts
	// Sending is what coild says of the packets, nil if it sent none, and NotSent says why.
	Sending *inspection.Sending
	NotSent string
	// After are the Routers with their answers to "flows".
	After []AskedRouter
}

// HopCount counts packets at a hop.
type HopCount struct {
	// By is what counts, such as "link fou4_Xk2v" or "tracked flows".
	By string `json:"by"`
	// Exact says that only the packets that were sent are counted, each once; a link also counts those of others.
	Exact bool `json:"exact"`
	// Out are those on their way to the destination, and Back those on their way to the pod: of flows those that were answered, other than by errors of ICMP.
	Out  uint64 `json:"out"`
	Back uint64 `json:"back"`
	// OneWay says that answers may come by another link: those of a tunnel to a Service do.
	OneWay bool `json:"oneWay,omitempty"`
}

// String is for people.
func (c HopCount) String() string {
	text := fmt.Sprintf("%d out", c.Out)
	if !c.OneWay {
		text += fmt.Sprintf(", %d back", c.Back)
	}
	if !c.Exact {
		text += " on " + strings.TrimPrefix(c.By, "link ")
	}
	return text
}

// PathSending is what became of packets that were sent along a path.
type PathSending struct {
	inspection.Sending
	// Answered is how many of the packets the destination has answered, and Verdict says what became of the others.
	Answered int    `json:"answered"`
	Verdict  string `json:"verdict"`
}

// Complete says whether the destination has answered all packets.
func (s PathSending) Complete() bool { return s.Answered > 0 && s.Answered == len(s.Packets) }

// Send follows packets that were sent.
func Send(f SendFacts) Path {
	p := Trace(f.TraceFacts)
	if f.Sending == nil {
		p.Unknown = append(p.Unknown, "no packets were sent: "+f.NotSent)
		return p
	}
	var sources []string
	for i, h := range p.Hops {
		flows, _ := f.flowsAt(h)
		p.Hops[i].Count = f.count(h)
		p.Hops[i].Note = strings.TrimPrefix(h.Note+f.went(h, flows), "; ")
		for _, a := range sourcesOf(flows) {
			if !slices.Contains(sources, a) {
				sources = append(sources, a)
			}
		}
	}
	if len(sources) > 0 {
		p.Sources = sources // what kernels did, in place of what they would do
	}
	s := &PathSending{Sending: *f.Sending}
	for _, packet := range s.Packets {
		if packet.Arrived {
			s.Answered++
		}
	}
	s.Verdict = f.verdict(s.Answered)
	if !s.Complete() {
		s.Verdict += f.dropped()
	}
	p.Unknown = append(p.Unknown, s.Unknown...)
	p.Sending = s
	return p
}

// flowsAt are the flows of packets that are tracked at a hop, and whether all are known there.
func (f SendFacts) flowsAt(h PathHop) (flows []inspection.Flow, known bool) {
	for _, r := range f.After {
		if h.Where == r.where() && r.Answer != nil {
			return r.Answer.Flows, r.Answer.Flows != nil
		}
	}
	if !h.InPod && strings.HasPrefix(h.Where, "node ") && len(f.Sending.Flows) > 0 {
		return f.Sending.Flows, true
	}
	return nil, false
}

// went says how packets went on from a hop, if that isn't how they would by the hop.
func (f SendFacts) went(h PathHop, flows []inspection.Flow) (text string) {
	if from := sourcesOf(flows); len(from) > 0 && !slices.Equal(from, []string{h.From}) {
		text = "; packets went on as " + plan.Enumerate(from)
	}
	var to []string
	for _, x := range flows {
		if x.Destination != f.Sending.To && !slices.Contains(to, x.Destination) {
			to = append(to, x.Destination)
		}
	}
	if len(to) > 0 {
		text += "; packets went on to " + plan.Enumerate(to)
	}
	return text
}

// count is what is known of packets at a hop, nil for nothing.
func (f SendFacts) count(h PathHop) *HopCount {
	flows, known := f.flowsAt(h)
	switch {
	case known && !f.refused():
		return flowCount(flows)
	case strings.HasPrefix(h.Where, "router "):
		return f.tunnelCount(h.Where)
	}
	var c *HopCount
	for _, l := range f.Sending.Links {
		if l.InPod != h.InPod || h.InPod && !slices.Contains(h.Links, l.Link) || !h.InPod && !strings.HasPrefix(h.Where, "node ") {
			continue
		}
		if c == nil {
			c = &HopCount{By: "link " + l.Link, OneWay: len(h.Tunnels) > 0}
		} else {
			c.By += ", " + l.Link
		}
		c.Out, c.Back = c.Out+l.Out, c.Back+l.Back
	}
	return c
}

// refused says whether RST was an answer. Kernels forget a flow of which that is the first answer (nf_conntrack_proto_tcp.c).
func (f SendFacts) refused() bool {
	return slices.ContainsFunc(f.Sending.Packets, func(p inspection.SentPacket) bool { return p.Answer == "RST" })
}

// tunnelCount is that of a router's tunnel to the pod, nil if it isn't known.
func (f SendFacts) tunnelCount(where string) *HopCount {
	before, after := answerOf(f.Routers, where), answerOf(f.After, where)
	if before == nil || after == nil {
		return nil
	}
	was, is := trafficOf(before), trafficOf(after)
	if was.Link == "" || was.Link != is.Link {
		return nil
	}
	return &HopCount{By: "link " + is.Link, Out: is.Out - min(is.Out, was.Out), Back: is.Back - min(is.Back, was.Back)}
}

func flowCount(flows []inspection.Flow) *HopCount {
	c := &HopCount{By: "tracked flows", Exact: true, Out: uint64(len(flows))}
	for _, x := range flows {
		if x.Answered {
			c.Back++
		}
	}
	return c
}

// where names a router as a hop.
func (r AskedRouter) where() string { return "router " + r.Pod.Namespace + "/" + r.Pod.Name }

// verdict says how many packets were answered and, of the others, how far they came.
func (f SendFacts) verdict(answered int) string {
	all := f.Sending.Packets
	text := fmt.Sprintf("%d of %d answered", answered, len(all))
	if answered > 0 {
		text += answers(all)
	}
	if answered == len(all) {
		return text
	}
	var lost []inspection.SentPacket
	refused := ""
	for _, p := range all {
		switch {
		case p.NotSent != "":
			refused = p.NotSent
		case !p.Arrived:
			lost = append(lost, p)
		}
	}
	if refused != "" {
		text += fmt.Sprintf("; stopped in the pod: its kernel refuses to send: %s", refused)
	}
	if len(lost) == 0 {
		return text
	}
	if said := errorsOf(lost); said != "" {
		return text + "; " + said
	}
	return text + "; " + f.stopped(lost)
}

// dropped says what Coil's tables in the pod and on the node dropped meanwhile.
func (f SendFacts) dropped() string {
	var all []string
	for _, at := range []struct {
		where string
		by    map[string]uint64
	}{{"in the pod", f.Sending.Dropped.Pod}, {"on node " + f.Answer.Node.Name, f.Sending.Dropped.Node}} {
		if len(at.by) > 0 {
			all = append(all, at.where+" "+reasons(at.by))
		}
	}
	if len(all) == 0 {
		return ""
	}
	return "; meanwhile Coil's table of nftables dropped " + strings.Join(all, ", ")
}

// reasons are such as "3 as forged".
func reasons(by map[string]uint64) string {
	var all []string
	for _, name := range slices.Sorted(maps.Keys(by)) {
		all = append(all, fmt.Sprintf("%d as %s", by[name], name))
	}
	return strings.Join(all, ", ")
}

// answers are the kinds of answers, with the shortest and the longest time.
func answers(all []inspection.SentPacket) string {
	var kinds []string
	least, most := 0.0, 0.0
	for _, p := range all {
		if !p.Arrived {
			continue
		}
		if len(kinds) == 0 || p.Milliseconds < least {
			least = p.Milliseconds
		}
		most = max(most, p.Milliseconds)
		if !slices.Contains(kinds, p.Answer) {
			kinds = append(kinds, p.Answer)
		}
	}
	text := fmt.Sprintf(" (%s) in %s", plan.Enumerate(kinds), digits(least))
	if digits(most) != digits(least) {
		text += " to " + digits(most)
	}
	text += " ms"
	if slices.Contains(kinds, "RST") || slices.ContainsFunc(kinds, func(k string) bool { return strings.HasPrefix(k, "port unreachable") }) {
		text += ": the port refuses them, or a firewall does in its name"
	}
	return text
}

// digits has three digits of a number, or more before the point, and never an exponent.
func digits(x float64) string {
	if x >= 100 {
		return strconv.FormatFloat(x, 'f', 0, 64)
	}
	return strconv.FormatFloat(x, 'g', 3, 64)
}

// errorsOf are the errors that came back in place of answers, each once.
func errorsOf(lost []inspection.SentPacket) string {
	var said []string
	for _, p := range lost {
		if p.Answer == "" {
			continue
		}
		text := "an unknown host says: " + p.Answer
		if p.By != "" {
			text = p.By + " says: " + p.Answer
		}
		if !slices.Contains(said, text) {
			said = append(said, text)
		}
	}
	return strings.Join(said, ", ")
}

// stopped says how far packets came of which nobody says anything.
func (f SendFacts) stopped(lost []inspection.SentPacket) string {
	sent := uint64(len(f.Sending.IDs()))
	node := f.Answer.Node.Name
	tunnelled := false
	for _, h := range f.Answer.Hops {
		if !h.InPod {
			continue
		}
		tunnelled = tunnelled || len(h.Tunnels) > 0
		if slices.Contains(h.Links, "lo") {
			return "the pod itself has the address, and doesn't answer"
		}
		if c := f.count(PathHop{Hop: h}); c != nil && c.Out < sent {
			return fmt.Sprintf("stopped in the pod: %d of %d packets left by its %s", c.Out, sent, c.By)
		}
	}
	for _, l := range f.Sending.Links {
		if !l.InPod && l.Out < sent {
			return fmt.Sprintf("stopped between the pod and node %s: %d of %d packets came in by its link %s", node, l.Out, sent, l.Link)
		}
	}
	if tunnelled {
		return f.stoppedByRouter(lost)
	}
	where := "left the pod"
	if slices.ContainsFunc(f.Sending.Links, func(l inspection.LinkTraffic) bool { return !l.InPod }) {
		where = "reached node " + node
	}
	flows := flowsOf(lost, f.Sending.Flows)
	switch {
	case f.Sending.Flows == nil:
		return fmt.Sprintf("%s; whether node %s tracks their flows isn't known", where, node)
	case len(flows) == 0:
		return fmt.Sprintf("%s; node %s tracks none of their flows: it dropped the packets, or doesn't track connections", where, node)
	}
	return fmt.Sprintf("left the pod, and node %s%s; %s", node, translated(flows, f.Sending.From), unanswered(flows, "node "+node))
}

// stoppedByRouter is stopped of packets that have left the pod for a router.
func (f SendFacts) stoppedByRouter(lost []inspection.SentPacket) string {
	var reached, silent []string
	for _, r := range f.After {
		if why := r.unknown(); why != "" {
			silent = append(silent, r.where()+": "+why)
			continue
		}
		if flows := flowsOf(lost, r.Answer.Flows); len(flows) > 0 {
			reached = append(reached, fmt.Sprintf("%d reached %s%s; %s", len(flows), r.where(), translated(flows, ""), unanswered(flows, "the router")))
		}
	}
	if len(reached) > 0 {
		return "left the pod, " + strings.Join(reached, "; ")
	}
	for _, r := range f.After {
		if r.unknown() != "" {
			continue
		}
		count, dropped := f.tunnelCount(r.where()), f.droppedBy(r)
		switch {
		case count != nil && count.Out == 0: // what it dropped are packets of others
		case dropped != "":
			return fmt.Sprintf("stopped at %s, which dropped packets meanwhile: %s", r.where(), dropped)
		case count != nil:
			text := fmt.Sprintf("stopped at %s: %s of the pod came out of its tunnel, and it tracks none of them", r.where(), plan.Count(int(count.Out), "packet", "packets"))
			if f.Sending.Protocol == inspection.TCP {
				text += ", or RST came back to it"
			}
			return text
		}
	}
	if len(silent) > 0 {
		return "left the pod and its node; what routers got isn't known: " + strings.Join(silent, ", ")
	}
	var asked []string
	for _, r := range f.After {
		asked = append(asked, r.Pod.Namespace+"/"+r.Pod.Name)
	}
	if len(asked) == 0 {
		return fmt.Sprintf("left the pod and its link to node %s; no router is known that could be asked", f.Answer.Node.Name)
	}
	return fmt.Sprintf("left the pod and its link to node %s, and none of the routers that were asked got them: %s", f.Answer.Node.Name, plan.Enumerate(asked))
}

// unknown says why nobody knows which flows the router tracks; empty if they are known.
func (r AskedRouter) unknown() string {
	switch {
	case r.Answer == nil:
		return r.Unanswered
	case r.Answer.Flows == nil:
		return cmp.Or(strings.Join(r.Answer.Problems, ", "), "it says nothing of flows")
	}
	return ""
}

// droppedBy is what a router dropped, of all clients, since it was asked before.
func (f SendFacts) droppedBy(after AskedRouter) string {
	before := answerOf(f.Routers, after.where())
	if before == nil {
		return ""
	}
	return reasons(inspection.More(after.Answer.Dropped, before.Dropped))
}

// answerOf is the answer of the router with that name as a hop, nil if there is none.
func answerOf(all []AskedRouter, where string) *inspection.RouterAnswer {
	i := slices.IndexFunc(all, func(r AskedRouter) bool { return r.where() == where && r.Answer != nil })
	if i < 0 {
		return nil
	}
	return all[i].Answer
}

// trafficOf is that of the tunnel to the client that an answer is about.
func trafficOf(a *inspection.RouterAnswer) (t inspection.LinkTraffic) {
	for _, c := range a.Clients {
		if c.Traffic != nil {
			t = *c.Traffic
		}
	}
	return t
}

// flowsOf are the flows of packets.
func flowsOf(packets []inspection.SentPacket, flows []inspection.Flow) (all []inspection.Flow) {
	for _, x := range flows {
		if slices.ContainsFunc(packets, func(p inspection.SentPacket) bool { return p.ID == x.ID }) {
			all = append(all, x)
		}
	}
	return all
}

// translated says with which sources packets went on, unless that is the one they had.
func translated(flows []inspection.Flow, from string) string {
	sources := slices.DeleteFunc(sourcesOf(flows), func(a string) bool { return a == from })
	if len(sources) == 0 {
		return ""
	}
	return ", translated to " + plan.Enumerate(sources)
}

// sourcesOf are the addresses with which packets went on, each once.
func sourcesOf(flows []inspection.Flow) (all []string) {
	for _, x := range flows {
		a := x.Source
		if with, err := netip.ParseAddrPort(a); err == nil {
			a = with.Addr().String()
		}
		if !slices.Contains(all, a) {
			all = append(all, a)
		}
	}
	return all
}

// unanswered says whether answers came to where flows are tracked.
func unanswered(flows []inspection.Flow, where string) string {
	n := 0
	for _, x := range flows {
		if x.Answered {
			n++
		}
	}
	if n == 0 {
		return "no answer came back"
	}
	return fmt.Sprintf("%s came back to %s, and not to the pod", plan.Count(n, "answer", "answers"), where)
}
