package cniconf

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/containernetworking/cni/libcni"
)

// File is a network configuration of a folder, Coil's or another one.
type File struct {
	Name string
	// Plugins are the types of its plugins, in the order in which they are called; none if the content can't be
	// understood, so that runtimes don't use it either.
	Plugins []string
}

// List returns the network configurations of a folder in the order of runtimes, which use the first one. A folder that
// doesn't exist has none.
func List(dir string) ([]File, error) {
	paths, err := libcni.ConfFiles(dir, []string{".conf", extension, ".json"}) // sorted by name
	if err != nil {
		return nil, fmt.Errorf("read folder of network configurations: %w", err)
	}
	var files []File
	for _, path := range paths {
		content, err := os.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("read network configuration: %w", err)
		}
		var conf struct {
			Type    string // of a configuration of one plugin
			Plugins []struct{ Type string }
		}
		f := File{Name: filepath.Base(path)}
		if json.Unmarshal(content, &conf) == nil {
			if conf.Type != "" {
				f.Plugins = append(f.Plugins, conf.Type)
			}
			for _, p := range conf.Plugins {
				f.Plugins = append(f.Plugins, p.Type)
			}
		}
		files = append(files, f)
	}
	return files, nil
}
