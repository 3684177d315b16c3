package cniplugin

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/coil-net/coil/pkg/cniconf/spec"
)

// Keys of CNI_ARGS that Kubernetes' runtimes set, and the one that the plugin adds.
const (
	argPodNamespace = "K8S_POD_NAMESPACE"
	argPodName      = "K8S_POD_NAME"
	argIsChained    = "IS_CHAINED"
)

// complete completes the request of a command by CNI_ARGS and prevResult. Things that coild can do without are not
// required: DEL must work with whatever is left of the runtime's memory, so for it
// both are taken as far as they can be read.
func (c *command) complete() error {
	if err := checkText(c.request); err != nil {
		return err
	}
	var err error
	if c.args, err = parseArgs(c.rawArgs); err != nil && c.verb != verbDel {
		return err
	}
	if c.verb == verbAdd {
		for _, key := range []string{argPodNamespace, argPodName} {
			if c.args[key] == "" {
				return environment(
					fmt.Sprintf("%s is missing in CNI_ARGS: coil must be called by a Kubernetes container runtime", key),
					fmt.Sprintf("CNI_ARGS is %q", c.rawArgs))
			}
		}
	}
	chained := c.conf.PrevResult != nil
	c.args[argIsChained] = strconv.FormatBool(chained)
	if c.verb == verbCheck && !chained {
		return spec.NewError(spec.CodeInvalidConfig, "CHECK needs prevResult in the network configuration", "")
	}
	prev, err := c.conf.Previous()
	if err != nil && c.verb != verbDel {
		return err
	}
	if prev != nil {
		c.ips, c.interfaces = addresses(prev)
	}
	return nil
}

// checkText refuses bytes that a protobuf string can't hold.
func checkText(r request) error {
	for _, s := range []struct{ name, value string }{
		{"CNI_CONTAINERID", r.ContainerID}, {"CNI_NETNS", r.netns}, {"CNI_IFNAME", r.IfName}, {"CNI_PATH", r.path},
	} {
		if !utf8.ValidString(s.value) {
			return environment(fmt.Sprintf("%s is not valid UTF-8: %q", s.name, s.value), "")
		}
	}
	return nil
}

// parseArgs parses CNI_ARGS, "KEY=value;KEY=value". It returns the pairs that it could read
// together with the error about the others.
func parseArgs(s string) (map[string]string, error) {
	args := map[string]string{}
	var err error
	for pair := range strings.SplitSeq(s, ";") {
		if pair == "" {
			continue
		}
		key, value, ok := strings.Cut(pair, "=")
		if !ok || key == "" || !utf8.ValidString(pair) {
			err = environment(fmt.Sprintf("CNI_ARGS has an invalid pair %q, want KEY=value", pair), "")
			continue
		}
		args[key] = value
	}
	return args, err
}

// addresses returns the pod's addresses in a result, and its interfaces with whether
// they are in a sandbox. They are for the coild of Coil 2.x: this one reads the result itself.
func addresses(r *spec.Result) (ips []string, interfaces map[string]bool) {
	interfaces = make(map[string]bool, len(r.Interfaces))
	for _, i := range r.Interfaces {
		interfaces[i.Name] = interfaces[i.Name] || i.Sandbox != ""
	}
	for _, a := range r.Addresses {
		if n := a.Interface; n >= 0 && n < len(r.Interfaces) && r.Interfaces[n].Sandbox == "" {
			continue // of an interface on the host
		}
		ips = append(ips, a.IP)
	}
	return ips, interfaces
}
