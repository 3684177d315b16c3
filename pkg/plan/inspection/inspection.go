// Package inspection has what a node's coild answers when somebody asks what is wrong.
//
// Routers of Egresses answer, too. It owns the words of questions, the form of answers, in which these programs write them and coilctl reads them, and how a long one is cut. It
// must not know how anything is found out, nor what follows from it.
package inspection

import (
	"fmt"
	"time"
)

// Topic is what a Comparison is about.
type Topic string

// The topics. Those of a pod come first, then those that all pods of the node share.
const (
	// Veth is the host's end of the pod's link.
	Veth Topic = "veth"
	// Inside is what is in the pod's network namespace: its end of the link, addresses, routes.
	Inside Topic = "inside"
	// Routes are the routes to the pod in the table of pods.
	Routes Topic = "routes"
	// Ways are the routes that the kernel chooses for packets to the pod, by all its rules and tables.
	Ways Topic = "ways"
	// Sysctls are kernel parameters of the host's end, or of the host.
	Sysctls Topic = "sysctls"
	// Guard is the table of nftables that drops foreign sources.
	Guard Topic = "guard"
	// Tunnels is what the pod has for its Egresses, and what the node keeps of its packets.
	Tunnels Topic = "tunnels"
	// Floating are floating addresses that lead to the pod.
	Floating Topic = "floating"
	// Rules are the host's rules to the tables of pods and of unassigned addresses.
	Rules Topic = "rules"
	// Blocks are the routes that announce the node's blocks, and those that make the rest of these unreachable.
	Blocks Topic = "blocks"
)

// Comparison is one object of the kernel: what coild would make of it, and what there is.
type Comparison struct {
	Topic Topic `json:"topic"`
	// Object is such as "MTU of veth0a1b2c3d4e5".
	Object string `json:"object"`
	Want   string `json:"want,omitempty"`
	// Have is empty if nothing is there.
	Have string `json:"have,omitempty"`
	// OK says that both agree.
	OK bool `json:"ok"`
	// Unknown says why it couldn't be found out. Then Have and OK mean nothing.
	Unknown string `json:"unknown,omitempty"`
}

// String is for people.
func (c Comparison) String() string {
	switch {
	case c.Unknown != "":
		return fmt.Sprintf("%s isn't known: %s", c.Object, c.Unknown)
	case c.OK:
		return fmt.Sprintf("%s is %s", c.Object, c.Have)
	case c.Have == "" && c.Want == "":
		return c.Object
	case c.Have == "":
		return fmt.Sprintf("%s is missing: it should be %s", c.Object, c.Want)
	case c.Want == "":
		return fmt.Sprintf("%s: %s", c.Object, c.Have)
	}
	return fmt.Sprintf("%s is %s, not %s", c.Object, c.Have, c.Want)
}

// Answer is what coild says. Lists that it has nothing for are empty.
type Answer struct {
	// Question is such as "pod shop/cart-0".
	Question string `json:"question"`
	Node     Node   `json:"node"`
	// Attachments are those of the record that the question is about; of a node all.
	Attachments []Attachment `json:"attachments"`
	// Blocks are those of the record that the question is about; of a node all.
	Blocks []Block `json:"blocks"`
	// Host is what pods of the node share.
	Host []Comparison `json:"host"`
	// Address is what the node has for the floating address that the question is about, if Services are reached by it.
	Address []Comparison `json:"address,omitempty"`
	// Hops are how packets of the pod go to the address that the question is about: in the pod, and then on the node.
	Hops []Hop `json:"hops,omitempty"`
	// Sending is what became of packets that were sent, if the question asked for that.
	Sending *Sending `json:"sending,omitempty"`
	// Way is how the node reaches the address that the question is about.
	Way string `json:"way,omitempty"`
	// Problems say what couldn't be found out, and why.
	Problems []string `json:"problems,omitempty"`
	// Truncated says what was left out, and why.
	Truncated string `json:"truncated,omitempty"`
}

// Node is the node that answers.
type Node struct {
	Name    string    `json:"name"`
	UID     string    `json:"uid,omitempty"`
	Version string    `json:"version"`
	Now     time.Time `json:"now"`
	// NotReady says why coild serves no ADD; empty if it does.
	NotReady string `json:"notReady,omitempty"`
	// IPAM and Egress say whether coild gives addresses, and obeys annotations and policies for Egresses.
	IPAM   bool `json:"ipam"`
	Egress bool `json:"egress"`
	// NoTunnels says why the kernel can't make tunnels for Egresses; empty if it can.
	NoTunnels string `json:"noTunnels,omitempty"`
	// Conntrack is how many connections the node tracks; nil if that isn't known.
	Conntrack *Conntrack `json:"conntrack,omitempty"`
}

// Attachment is a pod's attachment to the network.
type Attachment struct {
	Record
	// Objects are its objects in the kernel. An answer about a node has only those that aren't as they should be.
	Objects []Comparison `json:"objects"`
	// Client is nil if the pod uses no Egress.
	Client *Client `json:"client,omitempty"`
	// Floating are the floating addresses that lead to the pod.
	Floating []string `json:"floating,omitempty"`
}

// Record is an attachment in the node's record of addresses.
type Record struct {
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifName"`
	Namespace   string `json:"namespace"`
	Pod         string `json:"pod"`
	PodUID      string `json:"podUID,omitempty"`
	// State is such as "attached"; see package store.
	State     string   `json:"state"`
	Pool      string   `json:"pool"`
	Block     string   `json:"block"`
	Addresses []string `json:"addresses"`
	// Netns is the path of the pod's network namespace. NetnsGone says that it isn't there any more, or is another one.
	Netns     string `json:"netns"`
	NetnsGone bool   `json:"netnsGone,omitempty"`
	HostLink  string `json:"hostLink,omitempty"`
	HostIndex int    `json:"hostIndex,omitempty"`
	// Since is when the state was entered.
	Since time.Time `json:"since"`
}

// Client is what the pod uses Egresses for.
type Client struct {
	Egresses []UsedEgress `json:"egresses"`
	// Tunnels are those that the pod has, as coild made them.
	Tunnels []string `json:"tunnels,omitempty"`
	// Trouble says why what is wanted isn't there yet; empty if it is.
	Trouble string `json:"trouble,omitempty"`
}

// UsedEgress is an Egress that the pod uses.
type UsedEgress struct {
	// Name is namespace/name.
	Name string `json:"name"`
	// Policy is the policy that lets the pod use it; empty if an annotation does.
	Policy       string `json:"policy,omitempty"`
	Destinations int    `json:"destinations"`
	// Former says that the pod doesn't ask for it any more, and its destinations stay closed.
	Former bool `json:"former,omitempty"`
}

// Hop is how a packet goes on in one network namespace, as the kernel says.
type Hop struct {
	// InPod says that it is the pod's namespace, and InTunnel that the packet is the outer one of a tunnel.
	InPod    bool `json:"inPod,omitempty"`
	InTunnel bool `json:"inTunnel,omitempty"`
	// From and To are the packet's addresses.
	From string `json:"from,omitempty"`
	To   string `json:"to"`
	// Rule leads to the table with the Route.
	Rule  string `json:"rule,omitempty"`
	Table int    `json:"table,omitempty"`
	Route string `json:"route,omitempty"`
	// Links are those by which the packet may leave, and Gateway is the next hop there.
	Links   []string `json:"links,omitempty"`
	Gateway string   `json:"gateway,omitempty"`
	// Tunnels are the other ends of the tunnels that the links are.
	Tunnels []string `json:"tunnels,omitempty"`
	// Dropped says why the packet gets lost here; empty if it doesn't.
	Dropped string `json:"dropped,omitempty"`
}

// Block is a block of the record.
type Block struct {
	Name string `json:"name"`
	Pool string `json:"pool"`
	// Ranges are its CIDRs.
	Ranges    string `json:"ranges"`
	Size      int    `json:"size"`
	Allocated int    `json:"allocated"`
	Cooling   int    `json:"cooling"`
}

// Limit is the most bytes of an answer.
const Limit = 256 << 10

// Write returns the answer as one line of JSON of at most limit bytes. Of a longer one the ends of lists are left out, and Truncated says so.
func (a Answer) Write(limit int) ([]byte, error) {
	all := a
	return write(&a, limit, func() bool {
		if !a.shorten() {
			return false
		}
		a.Truncated = fmt.Sprintf("the answer is limited to %d bytes: it has %d of %d attachments, %d of %d blocks, %d of %d objects of the host, and %d of %d problems; ask for one pod",
			limit, len(a.Attachments), len(all.Attachments), len(a.Blocks), len(all.Blocks), len(a.Host), len(all.Host), len(a.Problems), len(all.Problems))
		return true
	})
}

// shorten takes the second half of a list away, and says whether there was one.
func (a *Answer) shorten() bool {
	switch n := len(a.Attachments); {
	case n > 1:
		a.Attachments = a.Attachments[:n/2]
	case len(a.Blocks) > 0:
		a.Blocks = a.Blocks[:len(a.Blocks)/2]
	case len(a.Problems) > 0:
		a.Problems = a.Problems[:len(a.Problems)/2]
	case n == 1 && len(a.Attachments[0].Objects) > 0:
		one := a.Attachments[0] // others may have the list
		one.Objects = one.Objects[:len(one.Objects)/2]
		a.Attachments = []Attachment{one}
	case len(a.Host) > 0:
		a.Host = a.Host[:len(a.Host)/2]
	case n == 1:
		a.Attachments = nil
	default:
		return false
	}
	return true
}

// Parse reads an answer.
func Parse(text []byte) (*Answer, error) { return read[Answer](text, "the answer of coild") }

// Wrong returns the comparisons of a list that don't agree, or aren't known.
func Wrong(all []Comparison) []Comparison {
	wrong := []Comparison{}
	for _, c := range all {
		if !c.OK || c.Unknown != "" {
			wrong = append(wrong, c)
		}
	}
	return wrong
}
