package cniplugin

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/cniconf/spec"
)

// Keys of CNI_ARGS that Kubernetes' runtimes set, and the one that the plugin adds.
const (
	argPodNamespace = "K8S_POD_NAMESPACE"
	argPodName      = "K8S_POD_NAME"
	argIsChained    = "IS_CHAINED"
)

// newRequest returns the request for a command. What coild can do without is not
// required: DEL must work with whatever is left of the runtime's memory, so for it
// CNI_ARGS and prevResult are taken as far as they can be read.
func newRequest(c command) (request, error) {
	r := request{containerID: c.containerID, netns: c.netns, ifName: c.ifName, path: c.path, stdinData: c.stdin}
	if err := checkText(r); err != nil {
		return request{}, err
	}
	var err error
	if r.args, err = parseArgs(c.args); err != nil && c.verb != verbDel {
		return request{}, err
	}
	if c.verb == verbAdd {
		for _, key := range []string{argPodNamespace, argPodName} {
			if r.args[key] == "" {
				return request{}, environment(
					fmt.Sprintf("%s is missing in CNI_ARGS: coil must be called by a Kubernetes container runtime", key),
					fmt.Sprintf("CNI_ARGS is %q", c.args))
			}
		}
	}
	chained := c.conf.PrevResult != nil
	r.args[argIsChained] = strconv.FormatBool(chained)
	if c.verb == verbCheck && !chained {
		return request{}, spec.NewError(spec.CodeInvalidConfig, "CHECK needs prevResult in the network configuration", "")
	}
	prev, err := c.conf.Previous()
	if err != nil && c.verb != verbDel {
		return request{}, err
	}
	if prev != nil {
		r.ips, r.interfaces = addresses(prev)
	}
	return r, nil
}

// id is what the queue of deletions knows the attachment by.
func (r request) id() attachment.ID {
	return attachment.ID{ContainerID: r.containerID, IfName: r.ifName}
}

// checkText refuses what a protobuf string can't hold.
func checkText(r request) error {
	for _, s := range []struct{ name, value string }{
		{"CNI_CONTAINERID", r.containerID}, {"CNI_NETNS", r.netns}, {"CNI_IFNAME", r.ifName}, {"CNI_PATH", r.path},
	} {
		if !utf8.ValidString(s.value) {
			return environment(fmt.Sprintf("%s is not valid UTF-8: %q", s.name, s.value), "")
		}
	}
	return nil
}

// parseArgs parses CNI_ARGS, "KEY=value;KEY=value". It returns what it could read
// together with the error for what it couldn't.
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
