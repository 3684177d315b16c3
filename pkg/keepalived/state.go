package keepalived

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
)

// State is that of a VRRP instance.
type State string

// States of instances.
const (
	Master State = "MASTER"
	Backup State = "BACKUP"
	// Fault is the state of an instance that takes no part in elections: a link is down, or the source is missing.
	Fault State = "FAULT"
	// Init is the state of an instance that the daemon has just begun with.
	Init State = "INIT"
)

// InstanceState is a VRRP instance as the daemon has it. Those of operators are such, too.
type InstanceState struct {
	Name, Interface     string
	State               State
	RouterID            int
	Priority, Effective int // Effective is the priority with what the operator's tracking adds to it
	AdvertInterval      time.Duration
	NoPreempt           bool
	PreemptDelay        time.Duration
	Source              netip.Addr
	Peers               []netip.Addr
	Addresses           []AddressState
}

// AddressState is an address of an instance.
type AddressState struct {
	Address   netip.Addr
	Interface string
	// Assigned says that keepalived has given the address to the link. It gives all of them to the link of a master,
	// except what the kernel refuses.
	Assigned bool
}

// Assigned counts the addresses that the link has.
func (s InstanceState) Assigned() (n int) {
	for _, a := range s.Addresses {
		if a.Assigned {
			n++
		}
	}
	return n
}

const (
	instanceMark = " VRRP Instance = "
	// topologyEnd is the title of what the dump has after the instances, also when there are none.
	topologyEnd = "------< Interfaces >------"
)

// parseDump reads what the daemon writes about its instances; false when it isn't complete yet. What it doesn't understand
// is left out: an instance of the operator may be of a kind that Coil never makes.
func parseDump(text []byte) (all []InstanceState, complete bool) {
	var s *InstanceState
	list := ""
	for raw := range bytes.Lines(text) {
		line := strings.TrimRight(string(raw), "\n")
		switch {
		case line == topologyEnd && bytes.HasSuffix(raw, []byte("\n")):
			for i := range all {
				all[i].forgetAdvertised()
			}
			return all, true
		case strings.HasPrefix(line, instanceMark):
			all = append(all, InstanceState{Name: strings.TrimPrefix(line, instanceMark)})
			s, list = &all[len(all)-1], ""
		case strings.HasPrefix(line, "---"):
			s = nil
		case s == nil:
		case strings.HasPrefix(line, "     "):
			s.item(list, strings.Fields(line))
		default:
			key, value, ok := strings.Cut(strings.TrimSpace(line), " = ")
			if list = key; ok {
				s.set(key, strings.Fields(value))
			}
		}
	}
	return nil, false
}

// set takes a line of an instance.
func (s *InstanceState) set(key string, value []string) {
	if len(value) == 0 {
		return
	}
	number, _ := strconv.ParseFloat(value[0], 64)
	switch key {
	case "State":
		s.State = State(value[0])
	case "Interface":
		s.Interface = value[0]
	case "Using src_ip":
		s.Source, _ = netip.ParseAddr(value[0])
	case "Virtual Router ID":
		s.RouterID = int(number)
	case "Priority":
		s.Priority = int(number)
	case "Effective priority":
		s.Effective = int(number)
	case "Advert interval":
		s.AdvertInterval = duration(number, value)
	case "Preempt":
		s.NoPreempt = value[0] == "disabled"
	case "Preempt delay":
		s.PreemptDelay = duration(number, value)
	}
}

// duration is a number with a unit, which keepalived spells in several ways.
func duration(number float64, value []string) time.Duration {
	unit := time.Second
	if len(value) > 1 && strings.HasPrefix(value[1], "milli") {
		unit = time.Millisecond
	}
	return time.Duration(number * float64(unit)).Round(time.Millisecond)
}

// item takes a line below a line of an instance, such as
//
//	10.0.0.1 dev eth0 scope global set
func (s *InstanceState) item(list string, words []string) {
	if len(words) == 0 {
		return
	}
	address, _, _ := strings.Cut(words[0], "/")
	a, err := netip.ParseAddr(address)
	switch {
	case err != nil:
	case strings.HasPrefix(list, "Unicast Peer"):
		s.Peers = append(s.Peers, a)
	case strings.HasPrefix(list, "Virtual IP"):
		at := AddressState{Address: a, Assigned: slices.Contains(words, "set")}
		if i := slices.Index(words, "dev"); i >= 0 && i+1 < len(words) {
			at.Interface = words[i+1]
		}
		s.Addresses = append(s.Addresses, at)
	}
}

// forgetAdvertised removes the address that only adverts need, and sorts the others.
func (s *InstanceState) forgetAdvertised() {
	advertised := Instance{RouterID: s.RouterID, Source: s.Source}.advertised()
	s.Addresses = slices.DeleteFunc(s.Addresses, func(a AddressState) bool { return a.Address == advertised && a.Interface == loopback })
	slices.SortFunc(s.Addresses, func(a, b AddressState) int { return a.Address.Compare(b.Address) })
	slices.SortFunc(s.Peers, netip.Addr.Compare)
}

// Followed returns why instances of the daemon aren't those of the configuration; nil if they are. The daemon may have others.
func (c Config) Followed(states []InstanceState) error {
	for _, want := range c.Instances {
		have, ok := named(states, want.Name)
		if !ok {
			return fmt.Errorf("instance %s is missing", want.Name)
		}
		if err := have.differs(want.normal()); err != nil {
			return err
		}
	}
	return nil
}

// differs says in what the daemon's instance isn't the wanted one, which is in normal form; nil if it is.
func (s InstanceState) differs(want Instance) error {
	if err := s.differsIn(want); err != nil {
		return fmt.Errorf("instance %s %w", want.Name, err)
	}
	var refused []string
	for _, a := range s.Addresses {
		if s.State == Master && !a.Assigned {
			refused = append(refused, a.Address.String())
		}
	}
	if len(refused) > 0 {
		return fmt.Errorf("instance %s is the master, but link %s doesn't get %s: see keepalived's log for what the kernel says, "+
			"for example when net.ipv6.conf.%[2]s.disable_ipv6 is 1", want.Name, want.AddressInterface, some(refused))
	}
	return nil
}

func (s InstanceState) differsIn(want Instance) error {
	for _, d := range []struct {
		what      string
		have, not any
	}{
		{"interface", s.Interface, want.Interface},
		{"virtual router ID", s.RouterID, want.RouterID},
		{"priority", s.Priority, want.Priority},
		{"advert interval", s.AdvertInterval, want.AdvertInterval},
		{"nopreempt", s.NoPreempt, want.NoPreempt},
		{"preempt delay", s.PreemptDelay, want.PreemptDelay},
		{"source", s.Source, want.Source},
	} {
		if d.have != d.not {
			return fmt.Errorf("has %s %v, not %v", d.what, d.have, d.not)
		}
	}
	if !slices.Equal(s.Peers, want.Peers) {
		return fmt.Errorf("has peers %v, not %v", s.Peers, want.Peers)
	}
	have := map[netip.Addr]string{}
	for _, a := range s.Addresses {
		have[a.Address] = a.Interface
	}
	var lacks []string
	for _, a := range want.Addresses {
		if have[a] != want.AddressInterface {
			lacks = append(lacks, a.String())
		}
		delete(have, a)
	}
	if len(lacks) > 0 {
		return fmt.Errorf("lacks %s on %s", some(lacks), want.AddressInterface)
	}
	for a := range have {
		return fmt.Errorf("has %d addresses too many, for example %s", len(have), a)
	}
	return nil
}

// some names a few of many.
func some(all []string) string {
	const few = 3
	if len(all) <= few {
		return strings.Join(all, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(all[:few], ", "), len(all)-few)
}

// instance is what the daemon does, as a value that could be wanted.
func (s InstanceState) instance() Instance {
	i := Instance{
		Name: s.Name, Interface: s.Interface, RouterID: s.RouterID, Priority: s.Priority, NoPreempt: s.NoPreempt,
		PreemptDelay: s.PreemptDelay, AdvertInterval: s.AdvertInterval, Source: s.Source, Peers: s.Peers,
	}
	for _, a := range s.Addresses {
		i.AddressInterface = a.Interface
		i.Addresses = append(i.Addresses, a.Address)
	}
	return i
}
