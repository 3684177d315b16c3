package spec

import (
	"fmt"
	"strings"
)

const (
	// PluginType is the value of "type", and the name of the plugin's file.
	PluginType = "coil"
	// DefaultSocket is where coild listens.
	DefaultSocket = "/run/coild.sock"
	// DefaultDelQueueDir is the folder where DELs wait for coild.
	DefaultDelQueueDir = "/var/lib/coil/del-queue"

	// maxSocketPath is the length of sun_path without its NUL (unix(7)).
	maxSocketPath = 107
)

// Conf is the network configuration of the plugin: what the runtime gives it on
// standard input, and one element of a conflist's "plugins". Keys of other plugins and
// of the specification that Coil has no use for are ignored.
type Conf struct {
	CNIVersion, Name, Type string
	// Socket is the absolute path of coild's socket.
	Socket string
	// DelQueueDir is the absolute path of the folder where DELs wait for coild.
	DelQueueDir string
	// PrevResult is the result of the plugin before this one (ADD), or of the whole
	// list (CHECK, DEL); Null if there is none.
	PrevResult Value
	// All is the whole configuration.
	All Value
}

// ParseConf reads the configuration and sets the defaults. Its errors are of code 6 (no
// JSON, or a value of another kind) or 7 (a value can't be).
func ParseConf(data []byte) (Conf, error) {
	v, err := Parse(data)
	if err == nil && v.Kind != Object && v.Kind != Null {
		err = fmt.Errorf("it is not an object")
	}
	if err != nil {
		return Conf{}, NewError(CodeDecodingFailure, "network configuration is not valid JSON", err.Error())
	}
	c := Conf{Socket: DefaultSocket, DelQueueDir: DefaultDelQueueDir, PrevResult: v.Get("prevResult"), All: v}
	for _, f := range []struct {
		key string
		to  *string
	}{{"cniVersion", &c.CNIVersion}, {"name", &c.Name}, {"type", &c.Type}, {"socket", &c.Socket}, {"delQueueDir", &c.DelQueueDir}} {
		m := v.Get(f.key)
		if m.Kind != String && m.Kind != Null {
			return Conf{}, NewError(CodeDecodingFailure, "network configuration is not valid JSON", f.key+" is not a string")
		}
		if m.Text != "" {
			*f.to = m.Text
		}
	}
	for _, p := range []struct{ key, path string }{{"socket", c.Socket}, {"delQueueDir", c.DelQueueDir}} {
		if !strings.HasPrefix(p.path, "/") {
			return Conf{}, NewError(CodeInvalidConfig, fmt.Sprintf("%s %q of the network configuration must be an absolute path", p.key, p.path), "")
		}
	}
	if len(c.Socket) > maxSocketPath {
		return Conf{}, NewError(CodeInvalidConfig,
			fmt.Sprintf("socket %q of the network configuration is longer than %d bytes", c.Socket, maxSocketPath), "")
	}
	return c, nil
}
