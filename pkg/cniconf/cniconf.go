// Package cniconf keeps Coil's network configuration in the folder that the container
// runtime reads: staged by coil-installer, put in place by coild.
//
// It owns the files <name> and <name>.staged, and what a valid conflist of Coil is.
// It touches no other file of the folder. It must not know when coild is ready.
//
//	file            written by        meaning
//	<name>.staged   coil-installer    the configuration to use; runtimes don't read it
//	<name>          coild             in use: coild can serve ADD
//
// The staged file stays when it is put in place, as a copy rather than by a rename:
// a removed or edited configuration is restored from it, also after coild
// restarted, which runs no installer. Without it, a configuration in use stays, and one
// that is removed comes back only as long as coild runs, which remembers it.
package cniconf

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/utils"

	"github.com/coil-net/coil/pkg/atomicfile"
	"github.com/coil-net/coil/pkg/cniconf/spec"
)

const (
	// DefaultName is the usual name of the conflist's file. Of several conflists
	// runtimes use the one whose name sorts first.
	DefaultName = "10-coil.conflist"
	// extension is that of conflists; runtimes read no others.
	extension    = ".conflist"
	stagedSuffix = ".staged"

	// maxNetworkName is the most bytes in the name of a network. Runtimes keep the result of each ADD in a file
	// <network>-<container>-<interface> (libcni, CNIConfig.AddNetworkList): NAME_MAX without IDs of 64 bytes, names of
	// IFNAMSIZ-1 bytes and two hyphens.
	maxNetworkName = 255 - 64 - 15 - 2

	mode = 0o644
)

// ErrNotStaged: there is nothing to put in place, nor is it there already; coil-installer
// must run first.
var ErrNotStaged = errors.New("no network configuration is staged")

// CheckName tells whether a conflist can have this file name.
func CheckName(name string) error {
	switch {
	case name == "" || name != filepath.Base(name) || strings.HasPrefix(name, "."):
		return fmt.Errorf("%q is not the name of a file", name)
	case filepath.Ext(name) != extension || name == extension:
		return fmt.Errorf("name %q must end in %s: container runtimes read no others", name, extension)
	}
	return nil
}

// Validate tells whether content is a conflist that runtimes can use with the plugin
// coil, and returns notes about it for the admin.
func Validate(content []byte) (notes []string, err error) {
	list, err := libcni.NetworkConfFromBytes(content)
	if err != nil {
		return nil, fmt.Errorf("network configuration: %w", err)
	}
	if err := utils.ValidateNetworkName(list.Name); err != nil {
		return nil, fmt.Errorf("name of the network configuration: %w", err)
	}
	if len(list.Name) > maxNetworkName {
		return nil, fmt.Errorf("name of the network configuration has %d characters: runtimes name files by it, so that %d is the most",
			len(list.Name), maxNetworkName)
	}
	if len(list.Plugins) == 0 {
		return nil, fmt.Errorf(`network configuration has no "plugins": it must be a conflist`)
	}
	found := 0
	for _, p := range list.Plugins {
		if p.Network.Type != spec.PluginType {
			continue
		}
		found++
		if _, err := spec.ParseConf(p.Bytes); err != nil {
			return nil, fmt.Errorf("plugin %s of the network configuration: %w", spec.PluginType, err)
		}
		if err := spec.CheckVersion(list.CNIVersion); err != nil {
			return nil, fmt.Errorf("plugin %s of the network configuration: %w", spec.PluginType, err)
		}
	}
	if found != 1 {
		return nil, fmt.Errorf("network configuration has %d plugins of type %q, want one", found, spec.PluginType)
	}
	if !spec.Since(list.CNIVersion, "1.1.0") {
		notes = append(notes, fmt.Sprintf("cniVersion is %s: runtimes ask for STATUS and GC only from 1.1.0 on", list.CNIVersion))
	}
	return notes, nil
}

// Stage writes the configuration that coild is to put in place. changed is false
// when the same is staged already.
func Stage(dir, name string, content []byte) (changed bool, err error) {
	if err := CheckName(name); err != nil {
		return false, err
	}
	if _, err := Validate(content); err != nil {
		return false, err
	}
	return atomicfile.Ensure(filepath.Join(dir, name+stagedSuffix), content, mode)
}

// Keeper keeps the configuration in place. Not for several goroutines at once.
type Keeper struct {
	Dir, Name string
	// last is the configuration that was put in place, or was there already.
	last []byte
}

// Activate puts the staged configuration in place. Its readers see the old or the
// new one, complete. changed is false, and nothing is written, when it is in place
// already. It can be called as often as wanted: a configuration that somebody removed
// or edited is restored. When none is staged, the one in use will do if it is valid,
// else the last one; ErrNotStaged when there is none of them.
func (k *Keeper) Activate() (changed bool, err error) {
	if err := CheckName(k.Name); err != nil {
		return false, err
	}
	path := filepath.Join(k.Dir, k.Name)
	content, err := os.ReadFile(path + stagedSuffix)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if content = k.fallback(path); content == nil {
			return false, fmt.Errorf("%w as %s", ErrNotStaged, path+stagedSuffix)
		}
	case err != nil:
		return false, fmt.Errorf("read the staged network configuration: %w", err)
	case !json.Valid(content):
		return false, fmt.Errorf("staged network configuration %s is not valid JSON", path+stagedSuffix)
	}
	if changed, err = atomicfile.Ensure(path, content, mode); err == nil {
		k.last = content
	}
	return changed, err
}

// fallback returns the configuration to put in place when none is staged; nil for none.
func (k *Keeper) fallback(path string) []byte {
	if live, err := os.ReadFile(path); err == nil {
		if _, err := Validate(live); err == nil {
			return live
		}
	}
	return k.last
}

// Preferred returns the names of configurations of others that runtimes use rather
// than name, because they sort before it.
func Preferred(dir, name string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("read folder of network configurations: %w", err)
	}
	var out []string
	for _, e := range entries {
		ext := filepath.Ext(e.Name())
		if !e.IsDir() && e.Name() < name && slices.Contains([]string{".conf", extension, ".json"}, ext) {
			out = append(out, e.Name())
		}
	}
	return out, nil
}
