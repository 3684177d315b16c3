package inspection

import (
	"fmt"
	"time"
)

// The topics of what a router of an Egress has for a client, and for all.
const (
	// RouterTunnel is the tunnel to a client.
	RouterTunnel Topic = "tunnel"
	// RouterRoute is the route to a client.
	RouterRoute Topic = "route"
	// RouterRules are the rules that lead to the table of clients.
	RouterRules Topic = "rules"
	// RouterFilter is the table of nftables that lets clients in, and translates their addresses.
	RouterFilter Topic = "filter"
)

// RouterAnswer is what coil-egress says. Lists that it has nothing for are empty.
type RouterAnswer struct {
	// Question is such as "client 10.100.0.33".
	Question string `json:"question"`
	Router   Router `json:"router"`
	// Clients are those that the question is about; of the router all that aren't as they should be.
	Clients []RouterClient `json:"clients"`
	// Shared is what all clients need.
	Shared []Comparison `json:"shared"`
	// Dropped counts packets that the router has dropped since its table was made, by the reason, and Translated those that left with another source.
	Dropped    map[string]uint64 `json:"dropped,omitempty"`
	Translated uint64            `json:"translated"`
	// Way is by which address a client leaves to a destination, if the question is about that.
	Way *RouterWay `json:"way,omitempty"`
	// Flows are those that the router has of the ones that the question is about; nil if the question is about none, or they couldn't be read.
	Flows []Flow `json:"flows,omitzero"`
	// Problems say what couldn't be found out, and why.
	Problems []string `json:"problems,omitempty"`
	// Truncated says what was left out, and why.
	Truncated string `json:"truncated,omitempty"`
}

// Router is the router that answers.
type Router struct {
	Namespace string    `json:"namespace"`
	Pod       string    `json:"pod"`
	Egress    string    `json:"egress"`
	Version   string    `json:"version"`
	Now       time.Time `json:"now"`
	// NotReady says why it serves no clients; empty if it does.
	NotReady string `json:"notReady,omitempty"`
	// Uplink is the link to everything, and Addresses are the router's own there.
	Uplink    string   `json:"uplink"`
	Addresses []string `json:"addresses"`
	// Floating are the floating addresses of the Egress by which clients leave, and Transits those that the node translates to its own.
	Floating []string `json:"floating,omitempty"`
	Transits []string `json:"transits,omitempty"`
	// Destinations are what clients may reach.
	Destinations []string `json:"destinations"`
	// Clients is how many there are, and Tunnels how many of them have a tunnel in the kernel.
	Clients int `json:"clients"`
	Tunnels int `json:"tunnels"`
	// MaxPerClient is how many connections a client may have; 0 is any number. Over are clients that have more.
	MaxPerClient int       `json:"maxPerClient,omitempty"`
	Over         []string  `json:"over,omitempty"`
	Conntrack    Conntrack `json:"conntrack"`
}

// Conntrack is how many connections the kernel tracks, and can track, in a network namespace.
type Conntrack struct {
	Count int `json:"count"`
	// Limit is 0 if nothing is tracked.
	Limit int `json:"limit"`
}

// Nearly says whether hardly any more connections can be tracked.
func (c Conntrack) Nearly() bool { return c.Limit > 0 && c.Count*10 >= c.Limit*9 }

// String is such as "120 of 65536 connections are tracked".
func (c Conntrack) String() string {
	if c.Limit == 0 {
		return "no connections are tracked"
	}
	return fmt.Sprintf("%d of %d connections are tracked", c.Count, c.Limit)
}

// RouterClient is an address of a client.
type RouterClient struct {
	Address string `json:"address"`
	// Pods are those that are listed with it, as namespace/name: two while one of them ends.
	Pods []string `json:"pods"`
	// Link is the tunnel; empty if there is none.
	Link string `json:"link,omitempty"`
	// Traffic are the packets of the tunnel since it was made; nil if they aren't known, or the question is about all clients.
	Traffic *LinkTraffic `json:"traffic,omitempty"`
	// Objects are its objects in the kernel.
	Objects []Comparison `json:"objects"`
}

// RouterWay is how a client's packets leave.
type RouterWay struct {
	Client      string `json:"client"`
	Destination string `json:"destination"`
	// Allowed says whether clients may reach the destination.
	Allowed bool `json:"allowed"`
	// Source is the address that the destination sees; empty if no connection is opened, which Why explains.
	Source string `json:"source,omitempty"`
	Why    string `json:"why,omitempty"`
	// Route is the route that the packets take after that.
	Route string `json:"route,omitempty"`
}

// Write returns the answer as one line of JSON of at most limit bytes. Of a longer one the ends of lists are left out, and Truncated says so.
func (a RouterAnswer) Write(limit int) ([]byte, error) {
	all := a
	return write(&a, limit, func() bool {
		switch {
		case len(a.Clients) > 0:
			a.Clients = a.Clients[:len(a.Clients)/2]
		case len(a.Router.Destinations) > 0:
			a.Router.Destinations = a.Router.Destinations[:len(a.Router.Destinations)/2]
		case len(a.Router.Over) > 0:
			a.Router.Over = nil
		case len(a.Shared)+len(a.Problems) > 0:
			a.Shared, a.Problems = nil, nil
		default:
			return false
		}
		a.Truncated = fmt.Sprintf("the answer is limited to %d bytes: it has %d of %d clients, %d of %d destinations, and %d of %d problems; ask for one client",
			limit, len(a.Clients), len(all.Clients), len(a.Router.Destinations), len(all.Router.Destinations), len(a.Problems), len(all.Problems))
		return true
	})
}

// ParseRouter reads an answer of a router.
func ParseRouter(text []byte) (*RouterAnswer, error) {
	return read[RouterAnswer](text, "the answer of coil-egress")
}
