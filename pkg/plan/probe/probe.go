// Package probe has what a node tells of itself before Coil is installed or updated on it.
//
// It owns the form in which coild probe writes it, and coil-migrator preflight reads it. It must not know how it is
// found out, nor what follows from it.
package probe

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
)

// Result is what was found on a node.
type Result struct {
	// Kernel is the release of the running kernel, as uname(2) has it.
	Kernel string `json:"kernel"`
	// ModulesUnlisted says that /lib/modules has no lists for this kernel. The modules that aren't loaded then count as
	// missing, although the kernel may have them built in.
	ModulesUnlisted bool `json:"modulesUnlisted,omitempty"`
	// MissingModules are the kernel modules that every node needs, and this one can't have.
	MissingModules []string `json:"missingModules,omitempty"`
	// MissingEgressModules are those that clients and routers of Egresses need besides.
	MissingEgressModules []string `json:"missingEgressModules,omitempty"`
	// CNI has the network configurations that container runtimes read, in their order.
	CNI []CNIFile `json:"cni,omitempty"`
	// Record is the node's record of addresses; nil if there is none.
	Record *Record `json:"record,omitempty"`
	// Problems say what couldn't be found out, and why.
	Problems []string `json:"problems,omitempty"`
}

// CNIFile is a network configuration.
type CNIFile struct {
	Name string `json:"name"`
	// Plugins are the types of its plugins, in the order in which they are called; none if the file can't be understood.
	Plugins []string `json:"plugins,omitempty"`
}

// Record is the file of the node's record of addresses.
type Record struct {
	// Version is the version of its schema, 0 if none is made yet.
	Version int `json:"version"`
	// Known is the newest version that the coild which looked knows.
	Known int `json:"known"`
	// Damaged says that the file is no record of Coil.
	Damaged bool `json:"damaged,omitempty"`
}

// Parse returns the result in the log of a pod that ran coild probe: the last line that begins as an object does.
// The other lines are klog's. An error has the log.
func Parse(log []byte) (*Result, error) {
	var found []byte
	for line := range bytes.Lines(log) {
		if bytes.HasPrefix(line, []byte("{")) {
			found = line
		}
	}
	if found == nil {
		return nil, fmt.Errorf("no result in the log %q", log)
	}
	into := json.NewDecoder(bytes.NewReader(found))
	into.DisallowUnknownFields()
	var r Result
	if err := into.Decode(&r); err != nil {
		return nil, fmt.Errorf("result %q: %w: give the image of the same version as coil-migrator (--image)", found, err)
	}
	if r.Kernel == "" {
		return nil, errors.New("the result names no kernel: give the image of the same version as coil-migrator (--image)")
	}
	return &r, nil
}
