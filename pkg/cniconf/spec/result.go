package spec

import (
	"errors"
	"fmt"
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

	all Value
}

// ParseResult reads a result. The given version holds if the result doesn't say its
// own, as those before 1.0.0 may.
func ParseResult(v Value, version string) (Result, error) {
	if v.Kind != Object {
		return Result{}, errors.New("it is not an object")
	}
	r := Result{Version: version, all: v}
	own := v.Get("cniVersion")
	if own.Kind != String && own.Kind != Null {
		return Result{}, errors.New("cniVersion is not a string")
	}
	if own.Text != "" {
		r.Version = own.Text
	}
	if !slices.Contains(append(Versions(), "0.3.0"), r.Version) {
		return Result{}, fmt.Errorf("results of version %q are unknown", r.Version)
	}
	for _, key := range []string{"interfaces", "ips", "routes"} {
		list := v.Get(key)
		if list.Kind != Array && list.Kind != Null {
			return Result{}, fmt.Errorf("%s is not an array", key)
		}
		for i, e := range list.Elems {
			if e.Kind != Object {
				return Result{}, fmt.Errorf("%s[%d] is not an object", key, i)
			}
		}
	}
	for _, e := range v.Get("interfaces").Elems {
		name, sandbox := e.Get("name"), e.Get("sandbox")
		if name.Kind != String || sandbox.Kind != String && sandbox.Kind != Null {
			return Result{}, fmt.Errorf("interface %s has no name, or a sandbox that is no string", e.Raw)
		}
		r.Interfaces = append(r.Interfaces, Interface{name.Text, sandbox.Text})
	}
	for _, e := range v.Get("ips").Elems {
		a, err := parseAddress(e)
		if err != nil {
			return Result{}, err
		}
		r.Addresses = append(r.Addresses, a)
	}
	return r, nil
}

func parseAddress(e Value) (Address, error) {
	a := Address{Interface: -1}
	ip, bits, ok := strings.Cut(e.Get("address").Text, "/")
	if n, err := strconv.Atoi(bits); !ok || ip == "" || err != nil || n < 0 || n > 128 {
		return a, fmt.Errorf("address %s is not a CIDR", e.Get("address").Raw)
	}
	a.IP = ip
	if i := e.Get("interface"); i.Kind != Null {
		n, err := strconv.Atoi(string(i.Raw))
		if err != nil {
			return a, fmt.Errorf("interface of address %s is %s", ip, i.Raw)
		}
		a.Interface = n
	}
	return a, nil
}

// As is the text of the result in a version that the plugin speaks. A result of this
// version is as it came.
func (r Result) As(version string) []byte {
	if r.Version == version && r.all.Get("cniVersion").Text == version {
		return r.all.Raw
	}
	b := AppendString([]byte(`{"cniVersion":`), version)
	for _, m := range r.all.Members {
		if m.Name == "cniVersion" {
			continue
		}
		b = appendName(append(b, ','), m.Name)
		if m.Name != "ips" || m.Value.Kind != Array {
			b = append(b, m.Value.Raw...)
			continue
		}
		b = append(b, '[')
		for i, e := range m.Value.Elems {
			if i > 0 {
				b = append(b, ',')
			}
			b = appendIP(b, e, version)
		}
		b = append(b, ']')
	}
	return append(b, '}')
}

func appendName(b []byte, name string) []byte { return append(AppendString(b, name), ':') }

// appendIP appends an address, with its family before 1.0.0.
func appendIP(b []byte, e Value, version string) []byte {
	b = append(b, '{')
	if !Since(version, "1.0.0") {
		family := "4"
		if strings.Contains(e.Get("address").Text, ":") {
			family = "6"
		}
		b = append(AppendString(appendName(b, "version"), family), ',')
	}
	first := true
	for _, m := range e.Members {
		if m.Name == "version" {
			continue
		}
		if !first {
			b = append(b, ',')
		}
		first = false
		b = append(appendName(b, m.Name), m.Value.Raw...)
	}
	return append(b, '}')
}
