package floating

import "slices"

// Strategy is how an address is chosen for a policy that names none.
type Strategy string

// Strategies.
const (
	// Default is the first address of the list that has room.
	Default Strategy = "Default"
	// Unused is an address that no policy has.
	Unused Strategy = "Unused"
	// LeastUsed is the address that the fewest policies have.
	LeastUsed Strategy = "LeastUsed"
	// Random is drawn once, and kept.
	Random Strategy = "Random"
)

// Assignment says which address a policy gets.
type Assignment struct {
	Strategy Strategy
	// MaxPolicies is how many policies an address has at most, 0 for any number.
	MaxPolicies int
	// Refuse says that a policy gets no address if the strategy finds none with room. Otherwise it gets the least used of those that it may
	// have.
	Refuse bool
	// Draw returns a random number below n, for Random.
	Draw func(n int) int
}

// Address is one of an Egress's.
type Address struct {
	Name string
	// Shared says that policies of any namespace may have it. Otherwise it belongs to the namespace of the oldest policy that has it.
	Shared bool
}

// Policy asks for an address.
type Policy struct {
	Namespace, Name string
	// Wants is the address that it names. Empty if the strategy is to choose.
	Wants string
	// Has is the address that it has got before.
	Has string
}

// Reason says why a policy has no address.
type Reason string

// Reasons.
const (
	// NoSuchAddress: the address that it names isn't one of the Egress's.
	NoSuchAddress Reason = "NoSuchAddress"
	// AddressTaken: the address that it names belongs to another namespace.
	AddressTaken Reason = "AddressTaken"
	// AddressFull: the address that it names has as many policies as it may.
	AddressFull Reason = "AddressFull"
	// NoAddress: no address is left for it.
	NoAddress Reason = "NoAddress"
)

// Given is what a policy gets: an address, or a reason why it gets none.
type Given struct {
	Address string
	Reason  Reason
}

// use is who has an address.
type use struct {
	Address
	owner    string // namespace, empty if nobody has it
	policies int
}

// Assign returns what each of the policies gets, in their order, the oldest first. A policy keeps what it has as long as it may. The
// others that name an address follow, then those for which the strategy chooses.
func (a Assignment) Assign(addresses []Address, policies []Policy) []Given {
	uses := make([]*use, len(addresses))
	for i, addr := range addresses {
		uses[i] = &use{Address: addr}
	}
	given := make([]Given, len(policies))
	for i, p := range policies {
		if p.Has != "" && (p.Wants == "" || p.Wants == p.Has) {
			if u, _ := a.named(uses, p.Has, p.Namespace); u != nil {
				given[i] = u.give(p)
			}
		}
	}
	for i, p := range policies {
		if p.Wants != "" && given[i].Address == "" {
			u, reason := a.named(uses, p.Wants, p.Namespace)
			if given[i] = (Given{Reason: reason}); u != nil {
				given[i] = u.give(p)
			}
		}
	}
	for i, p := range policies {
		if p.Wants == "" && given[i].Address == "" {
			given[i] = Given{Reason: NoAddress}
			if u := a.choose(uses, p.Namespace); u != nil {
				given[i] = u.give(p)
			}
		}
	}
	return given
}

// give lets a policy have the address.
func (u *use) give(p Policy) Given {
	u.policies++
	if u.owner == "" {
		u.owner = p.Namespace
	}
	return Given{Address: u.Name}
}

// named returns the use of an address by name, if a policy of the namespace may have it.
func (a Assignment) named(uses []*use, name, namespace string) (*use, Reason) {
	i := slices.IndexFunc(uses, func(u *use) bool { return u.Name == name })
	switch {
	case i < 0:
		return nil, NoSuchAddress
	case !uses[i].allows(namespace):
		return nil, AddressTaken
	case !a.room(uses[i]) && a.Refuse:
		return nil, AddressFull
	}
	return uses[i], ""
}

func (u *use) allows(namespace string) bool {
	return u.Shared || u.owner == "" || u.owner == namespace
}

func (a Assignment) room(u *use) bool { return a.MaxPolicies == 0 || u.policies < a.MaxPolicies }

// choose returns what the strategy finds for a policy of a namespace, nil if there is nothing.
func (a Assignment) choose(uses []*use, namespace string) *use {
	var may, room []*use
	for _, u := range uses {
		if u.allows(namespace) {
			may = append(may, u)
			if a.room(u) && (a.Strategy != Unused || u.policies == 0) {
				room = append(room, u)
			}
		}
	}
	switch {
	case len(room) == 0 && a.Refuse:
		return nil
	case len(room) == 0:
		return leastUsed(may)
	case a.Strategy == LeastUsed:
		return leastUsed(room)
	case a.Strategy == Random:
		return room[a.Draw(len(room))]
	}
	return room[0]
}

// leastUsed returns the first of those that the fewest policies have, nil of none.
func leastUsed(uses []*use) *use {
	if len(uses) == 0 {
		return nil
	}
	return slices.MinFunc(uses, func(a, b *use) int { return a.policies - b.policies })
}
