package spec

import (
	"cmp"
	"encoding/json"
	"errors"
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

// Conf is the network configuration of the plugin: the runtime's text on
// standard input, and one element of a conflist's "plugins". Keys of other plugins and
// of the specification that Coil has no use for are ignored.
type Conf struct {
	CNIVersion, Name, Type string
	// Socket is the absolute path of coild's socket.
	Socket string
	// DelQueueDir is the absolute path of the folder where DELs wait for coild.
	DelQueueDir string
	// PrevResult is the result of the plugin before this one (ADD), or of the whole
	// list (CHECK, DEL), as it came; nil if there is none.
	PrevResult json.RawMessage
}

// ParseConf reads the configuration and sets the defaults. Its errors are of code 6 (no
// JSON, or a value of another kind) or 7 (a value can't be).
func ParseConf(data []byte) (Conf, error) {
	var c Conf
	o, err := parseObject(data)
	err = errors.Join(err, o.get("cniVersion", &c.CNIVersion), o.get("name", &c.Name), o.get("type", &c.Type),
		o.get("socket", &c.Socket), o.get("delQueueDir", &c.DelQueueDir), o.get("prevResult", &c.PrevResult))
	if err != nil {
		return Conf{}, notJSON(err)
	}
	if string(c.PrevResult) == "null" {
		c.PrevResult = nil
	}
	c.Socket, c.DelQueueDir = cmp.Or(c.Socket, DefaultSocket), cmp.Or(c.DelQueueDir, DefaultDelQueueDir)
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

// Previous returns the result in PrevResult; nil if there is none. Its errors are of code 6.
func (c Conf) Previous() (*Result, error) {
	if c.PrevResult == nil {
		return nil, nil
	}
	r, err := ParseResult(c.PrevResult, c.CNIVersion)
	if err != nil {
		return nil, NewError(CodeDecodingFailure, "prevResult of the network configuration is not a CNI result", err.Error())
	}
	return &r, nil
}

func notJSON(err error) error {
	return NewError(CodeDecodingFailure, "network configuration is not valid JSON", err.Error())
}
