// Package netconf is the network configuration of the plugin coil: what the runtime
// gives it on standard input, and one element of a conflist's "plugins".
//
// It owns what coild and coil-installer make of that JSON with the CNI project's
// library; its keys are those of package spec, which is all that the plugin links. It
// must not know where a conflist is kept or how coild is called.
package netconf

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/types/create"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/cniconf/spec"
)

// PluginType is the value of "type", and the name of the plugin's file.
const PluginType = spec.PluginType

// SupportedVersions are the versions of the CNI specification that the plugin
// speaks, oldest first.
func SupportedVersions() []string { return spec.Versions() }

// Conf is the configuration.
type Conf spec.Conf

// Parse reads the configuration and sets the defaults. Its errors are CNI errors of
// code 6 (no JSON) or 7 (a value can't be).
func Parse(data []byte) (Conf, error) {
	c, err := spec.ParseConf(data)
	return Conf(c), cniError(err)
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

// ValidAttachments returns the attachments that the runtime listed for GC; see
// spec.ValidAttachments. Its errors are CNI errors of code 6 or 7.
func ValidAttachments(data []byte) ([]attachment.ID, error) {
	list, err := spec.ValidAttachments(data)
	return list, cniError(err)
}

// cniError returns an error as the CNI project's library knows it.
func cniError(err error) error {
	if e := (*spec.Error)(nil); errors.As(err, &e) {
		return types.NewError(e.Code, e.Msg, e.Details)
	}
	return err
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
