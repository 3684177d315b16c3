package cniplugin

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/cniconf/spec"
)

// verb is a CNI command, as in CNI_COMMAND.
type verb string

const (
	verbAdd     verb = "ADD"
	verbDel     verb = "DEL"
	verbCheck   verb = "CHECK"
	verbGC      verb = "GC"
	verbStatus  verb = "STATUS"
	verbVersion verb = "VERSION"
)

// command is a command of the runtime.
type command struct {
	verb          verb
	request                 // for coild
	rawArgs       string    // CNI_ARGS
	netnsOverride string    // CNI_NETNS_OVERRIDE
	conf          spec.Conf // of stdinData
	deadline      time.Time // of the command as a whole, connecting included
}

// verbs are the commands: the gRPC method of each, its timeout, the variables that it can't do without, and the version
// of the specification that brought it.
//
// The timeouts end before the runtime loses patience (the kubelet's runtimeRequestTimeout is 2 minutes, its longest call
// twice that), so that the reason reaches the events of the pod instead of "signal: killed". STATUS is asked every 5
// seconds.
var verbs = map[verb]struct {
	method  string
	timeout time.Duration
	needs   []string
	since   string
}{
	verbAdd:     {"/pkg.cnirpc.CNI/Add", 100 * time.Second, []string{"CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH"}, ""},
	verbCheck:   {"/pkg.cnirpc.CNI/Check", 30 * time.Second, []string{"CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH"}, "0.4.0"},
	verbDel:     {"/pkg.cnirpc.CNI/Del", 60 * time.Second, []string{"CNI_CONTAINERID", "CNI_IFNAME", "CNI_PATH"}, ""},
	verbGC:      {"/pkg.cnirpc.CNI/GC", 60 * time.Second, []string{"CNI_PATH"}, "1.1.0"},
	verbStatus:  {"/pkg.cnirpc.CNI/Status", 5 * time.Second, []string{"CNI_PATH"}, "1.1.0"},
	verbVersion: {},
}

// Main does the command that the environment tells, with the configuration on standard
// input. The error is for the runtime.
func (p Plugin) Main(getenv func(string) string, stdin io.Reader) *spec.Error {
	c, err := readCommand(getenv, stdin)
	if err == nil {
		err = p.do(c)
	}
	var e *spec.Error
	if err != nil && !errors.As(err, &e) {
		e = spec.NewError(spec.CodeInternal, err.Error(), "")
	}
	return e
}

// readCommand reads and checks a command, as the CNI project's library does it for
// plugins; the tests compare. VERSION needs nothing.
func readCommand(getenv func(string) string, stdin io.Reader) (command, error) {
	c := command{
		verb: verb(getenv("CNI_COMMAND")), rawArgs: getenv("CNI_ARGS"), netnsOverride: getenv("CNI_NETNS_OVERRIDE"),
		request: request{
			ID:    attachment.ID{ContainerID: getenv("CNI_CONTAINERID"), IfName: getenv("CNI_IFNAME")},
			netns: getenv("CNI_NETNS"), path: getenv("CNI_PATH"),
		},
	}
	traits, known := verbs[c.verb]
	if err := c.checkNames(traits.needs); err != nil {
		return c, err
	}
	needs := append([]string{"CNI_COMMAND"}, traits.needs...)
	missing := slices.DeleteFunc(needs, func(name string) bool { return getenv(name) != "" })
	switch {
	case len(missing) > 0:
		return c, environment(fmt.Sprintf("required env variables [%s] missing", strings.Join(missing, ",")), "")
	case c.verb == verbVersion:
		return c, nil
	}
	var err error
	if c.stdinData, err = io.ReadAll(stdin); err != nil {
		return c, spec.NewError(spec.CodeIOFailure, "error reading from stdin: "+err.Error(), "")
	}
	if c.conf, err = spec.ParseConf(c.stdinData); err != nil {
		return c, err
	}
	if err := c.checkNetwork(); err != nil {
		return c, err
	}
	if !known {
		return c, environment("unknown CNI_COMMAND: "+string(c.verb), "")
	}
	return c, c.checkVersion()
}

func environment(msg, details string) error {
	return spec.NewError(spec.CodeInvalidEnvironment, msg, details)
}

// checkNames checks those of the needed variables that are set.
func (c command) checkNames(needed []string) error {
	if c.ContainerID != "" && slices.Contains(needed, "CNI_CONTAINERID") && !spec.ValidName(c.ContainerID) {
		return environment("invalid characters in containerID", c.ContainerID)
	}
	if c.IfName == "" || !slices.Contains(needed, "CNI_IFNAME") {
		return nil
	}
	switch {
	case len(c.IfName) > maxIfName:
		return environment("interface name is too long", fmt.Sprintf("interface name should be less than %d characters", maxIfName+1))
	case c.IfName == "." || c.IfName == "..":
		return environment("interface name is . or ..", "")
	case strings.ContainsFunc(c.IfName, func(r rune) bool { return r == '/' || r == ':' || unicode.IsSpace(r) }):
		return environment("interface name contains / or : or whitespace characters", "")
	}
	return nil
}

// maxIfName is the length of a link's name, in bytes.
const maxIfName = 15

// checkNetwork checks the name that every configuration must have.
func (c command) checkNetwork() error {
	switch name := c.conf.Name; {
	case name == "":
		return spec.NewError(spec.CodeInvalidConfig, "missing network name", "")
	case !spec.ValidName(name):
		return spec.NewError(spec.CodeInvalidConfig, "invalid characters found in network name", name)
	}
	return nil
}

// checkVersion checks that the version of the configuration is one that the plugin
// speaks, and that it has the command.
func (c command) checkVersion() error {
	if err := spec.CheckVersion(c.conf.CNIVersion); err != nil {
		return err
	}
	if first := verbs[c.verb].since; first != "" && !spec.Since(c.conf.CNIVersion, first) {
		return spec.NewError(spec.CodeIncompatibleVersion, "config version does not allow "+string(c.verb), "")
	}
	return nil
}

// inHostNetwork says whether the pod's network namespace is the one in which the plugin
// runs. One that can't be looked at is for coild to judge.
func (c command) inHostNetwork() (bool, error) {
	if o := strings.ToUpper(c.netnsOverride); o == "TRUE" || o == "1" {
		return false, nil
	}
	pod, err := os.Stat(c.netns)
	if err != nil {
		return false, nil
	}
	own, err := os.Stat("/proc/self/ns/net") // all threads are in the same one
	if err != nil {
		return false, spec.NewError(spec.CodeInvalidNetns, "get plugin's netns failed", err.Error())
	}
	return os.SameFile(pod, own), nil
}
