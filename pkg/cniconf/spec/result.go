package spec

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// Interface is an interface of a result.
type Interface struct {
	Name string
	// Sandbox is the path of its network namespace; empty on the host.
	Sandbox string
}

// Address is an address of a result.
type Address struct {
	// IP is without the length of its prefix.
	IP string
	// Interface is the index of its interface; -1 if the result doesn't say.
	Interface int
}

// Result is a CNI result of a version from 0.3.0 on.
type Result struct {
	Version    string
	Interfaces []Interface
	Addresses  []Address

	raw []byte // nil if it doesn't say its version
	all object
	ips []object
}

// ParseResult reads a result. The given version holds if the result doesn't say its
// own, as those before 1.0.0 may.
func ParseResult(data []byte, version string) (Result, error) {
	all, err := parseObject(data)
	if err == nil && all == nil {
		err = errors.New("it is not an object")
	}
	r := Result{all: all}
	var interfaces, routes []object
	if err := errors.Join(err, all.get("cniVersion", &r.Version), all.get("interfaces", &interfaces), all.get("ips", &r.ips),
		all.get("routes", &routes)); err != nil {
		return Result{}, err
	}
	if r.Version != "" {
		r.raw = data
	}
	if r.Version = cmp.Or(r.Version, version); !slices.Contains(append(Versions(), "0.3.0"), r.Version) {
		return Result{}, fmt.Errorf("results of version %q are unknown", r.Version)
	}
	if slices.ContainsFunc(slices.Concat(interfaces, r.ips, routes), func(o object) bool { return o == nil }) {
		return Result{}, errors.New("null among the interfaces, ips or routes")
	}
	for n, o := range interfaces {
		var name *string
		var sandbox string
		if errors.Join(o.get("name", &name), o.get("sandbox", &sandbox)) != nil || name == nil {
			return Result{}, fmt.Errorf("interface %d has no name, or a sandbox that is no string", n)
		}
		r.Interfaces = append(r.Interfaces, Interface{*name, sandbox})
	}
	for _, o := range r.ips {
		a, err := parseAddress(o)
		if err != nil {
			return Result{}, err
		}
		r.Addresses = append(r.Addresses, a)
	}
	return r, nil
}

func parseAddress(o object) (Address, error) {
	a := Address{Interface: -1}
	var cidr string
	if err := errors.Join(o.get("address", &cidr), o.get("interface", &a.Interface)); err != nil {
		return a, err
	}
	ip, bits, ok := strings.Cut(cidr, "/")
	if n, err := strconv.Atoi(bits); !ok || ip == "" || err != nil || n < 0 || n > 128 {
		return a, fmt.Errorf("address %q is not a CIDR", cidr)
	}
	a.IP = ip
	return a, nil
}

// As is the text of the result in a version that the plugin speaks. A result of this
// version is as it came.
func (r Result) As(version string) []byte {
	if r.Version == version && r.raw != nil {
		return r.raw
	}
	all := maps.Clone(r.all)
	all["cniVersion"] = encode(version)
	if r.ips != nil {
		ips := make([]object, len(r.ips))
		for i, ip := range r.ips {
			ips[i] = maps.Clone(ip)
			delete(ips[i], "version")
			if !Since(version, "1.0.0") { // it has the family then
				ips[i]["version"] = encode("4")
				if strings.Contains(r.Addresses[i].IP, ":") {
					ips[i]["version"] = encode("6")
				}
			}
		}
		all["ips"] = encode(ips)
	}
	return encode(all)
}
