// Package netconf is the network configuration of the plugin coil: what the runtime
// gives it on standard input, and one element of a conflist's "plugins".
//
// It owns the keys of that JSON, their defaults and checks. The plugin, coild and
// coil-installer share it. It must not know where a conflist is kept or how coild is
// called; the plugin links it, so it must stay small.
package netconf

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/types/create"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/coil-net/coil/pkg/delqueue"
)

const (
	// PluginType is the value of "type", and the name of the plugin's file.
	PluginType = "coil"
	// DefaultSocket is where coild listens.
	DefaultSocket = "/run/coild.sock"

	// maxSocketPath is the length of sun_path without its NUL (unix(7)).
	maxSocketPath = 107
)

// SupportedVersions are the versions of the CNI specification that the plugin
// speaks, oldest first.
func SupportedVersions() []string { return []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"} }

// Conf is the configuration. Keys of other plugins and of the specification that
// Coil has no use for are ignored.
type Conf struct {
	CNIVersion string `json:"cniVersion"`
	Name       string `json:"name"`
	Type       string `json:"type"`

	// Socket is the absolute path of coild's socket.
	Socket string `json:"socket"`
	// DelQueueDir is the absolute path of the folder where DELs wait for coild.
	DelQueueDir string `json:"delQueueDir"`

	// PrevResult is the result of the plugin before this one (ADD), or of the whole
	// list (CHECK, DEL), as it came; nil if there is none.
	PrevResult json.RawMessage `json:"prevResult"`
}

// Parse reads the configuration and sets the defaults. Its errors are CNI errors of
// code 6 (no JSON) or 7 (a value can't be).
func Parse(data []byte) (Conf, error) {
	var c Conf
	if err := json.Unmarshal(data, &c); err != nil {
		return Conf{}, types.NewError(types.ErrDecodingFailure, "network configuration is not valid JSON", err.Error())
	}
	if string(c.PrevResult) == "null" {
		c.PrevResult = nil
	}
	if c.Socket == "" {
		c.Socket = DefaultSocket
	}
	if c.DelQueueDir == "" {
		c.DelQueueDir = delqueue.DefaultDir
	}
	for _, p := range []struct{ key, path string }{{"socket", c.Socket}, {"delQueueDir", c.DelQueueDir}} {
		if !filepath.IsAbs(p.path) {
			return Conf{}, invalid("%s %q of the network configuration must be an absolute path", p.key, p.path)
		}
	}
	if len(c.Socket) > maxSocketPath {
		return Conf{}, invalid("socket %q of the network configuration is longer than %d bytes", c.Socket, maxSocketPath)
	}
	return c, nil
}

// Previous decodes prevResult, which has the version of the configuration, and
// converts it to the newest one. It returns nil if there is none. Its errors are
// CNI errors of code 6.
func (c Conf) Previous() (*types100.Result, error) {
	if c.PrevResult == nil {
		return nil, nil
	}
	r, err := DecodeResult(c.PrevResult, c.CNIVersion)
	if err != nil {
		return nil, types.NewError(types.ErrDecodingFailure, "prevResult of the network configuration is not a CNI result", err.Error())
	}
	return r, nil
}

// DecodeResult decodes a CNI result and converts it to the newest version. The
// given version holds if the result doesn't say its own, as those before 1.0.0 may.
func DecodeResult(data []byte, version string) (*types100.Result, error) {
	var fields struct {
		CNIVersion string            `json:"cniVersion"`
		Interfaces []json.RawMessage `json:"interfaces"`
		IPs        []json.RawMessage `json:"ips"`
		Routes     []json.RawMessage `json:"routes"`
	}
	if err := json.Unmarshal(data, &fields); err != nil {
		return nil, err
	}
	// The library's conversions dereference each element.
	for _, e := range slices.Concat(fields.Interfaces, fields.IPs, fields.Routes) {
		if string(e) == "null" {
			return nil, errors.New("null among the interfaces, ips or routes")
		}
	}
	if fields.CNIVersion != "" {
		version = fields.CNIVersion
	} else {
		var all map[string]json.RawMessage
		if err := json.Unmarshal(data, &all); err != nil {
			return nil, err
		}
		if all == nil {
			return nil, errors.New("null")
		}
		all["cniVersion"], _ = json.Marshal(version)
		var err error
		if data, err = json.Marshal(all); err != nil {
			return nil, err
		}
	}
	r, err := create.Create(version, data)
	if err != nil {
		return nil, err
	}
	return types100.NewResultFromResult(r)
}

// ValidAttachments returns the attachments that the runtime listed for GC. The key is
// "cni.dev/valid-attachments"; runtimes also send the misspelling
// "cni.dev/attachments" of the first text of the specification
// (https://github.com/containernetworking/cni/issues/1101). What either lists is
// valid. A GC without any list is an error of code 7 rather than an order to
// release everything; null and [] are such an order.
func ValidAttachments(data []byte) ([]types.GCAttachment, error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(data, &fields); err != nil {
		return nil, types.NewError(types.ErrDecodingFailure, "network configuration is not valid JSON", err.Error())
	}
	valid := []types.GCAttachment{}
	seen := map[types.GCAttachment]bool{}
	found := false
	for _, key := range []string{"cni.dev/valid-attachments", "cni.dev/attachments"} {
		raw, ok := fields[key]
		if !ok {
			continue
		}
		found = true
		var list []types.GCAttachment
		if err := json.Unmarshal(raw, &list); err != nil {
			return nil, types.NewError(types.ErrDecodingFailure, key+" of the network configuration is not a list of attachments", err.Error())
		}
		for _, a := range list {
			if a.ContainerID == "" || a.IfName == "" {
				return nil, invalid("%s of the network configuration has an attachment without containerID or ifname", key)
			}
			if !seen[a] {
				seen[a] = true
				valid = append(valid, a)
			}
		}
	}
	if !found {
		return nil, invalid("network configuration has no cni.dev/valid-attachments: GC would release every attachment")
	}
	return valid, nil
}

// Validate checks an element of a conflist's "plugins" before it is used; version is
// that of the conflist.
func Validate(data []byte, cniVersion string) error {
	c, err := Parse(data)
	if err != nil {
		return err
	}
	if c.Type != PluginType {
		return invalid("type is %q, not %q", c.Type, PluginType)
	}
	if e := (&version.Reconciler{}).CheckRaw(cniVersion, SupportedVersions()); e != nil {
		return types.NewError(types.ErrIncompatibleCNIVersion, "incompatible CNI versions", e.Details())
	}
	return nil
}

func invalid(format string, args ...any) error {
	return types.NewError(types.ErrInvalidNetworkConfig, fmt.Sprintf(format, args...), "")
}
