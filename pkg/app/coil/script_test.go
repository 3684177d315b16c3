package coil_test

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/coil-net/coil/generated/cnirpc"
)

// TestScripts runs the plugin as a runtime does: environment, standard input, output
// and exit code. See scriptCommands for the commands of the scripts.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:  "testdata/script",
		Cmds: scriptCommands,
		Setup: func(e *testscript.Env) error {
			e.Vars = append(e.Vars, "SOCKET="+filepath.Join(e.WorkDir, "coild.sock"), "CNI_PATH=/opt/cni/bin",
				"CNI_CONTAINERID=c1", "CNI_NETNS=/run/netns/x", "CNI_IFNAME=eth0",
				"CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=ns1;K8S_POD_NAME=pod1;K8S_POD_INFRA_CONTAINER_ID=c1;K8S_POD_UID=uid1")
			e.Values[key{}] = new(running)
			e.Defer(func() { e.Values[key{}].(*running).end() })
			return nil
		},
	})
}

// running is the daemon of a script, if it runs.
type running struct {
	daemon *daemon
	stop   func()
	stdin  string // of the plugin's last run
}

func (r *running) end() {
	if r.stop != nil {
		r.stop()
		r.stop = nil
	}
}

type key struct{}

var scriptCommands = map[string]func(*testscript.TestScript, bool, []string){
	// netconf FILE VERSION [JSON]: writes a configuration with the socket, the queue
	// and more members.
	"netconf": func(ts *testscript.TestScript, _ bool, args []string) {
		conf := fmt.Sprintf(`{"cniVersion":%q,"name":"k8s-pod-network","type":"coil","socket":%q,"delQueueDir":%q`,
			args[1], ts.Getenv("SOCKET"), ts.MkAbs("del-queue"))
		for _, more := range args[2:] {
			conf += "," + more
		}
		ts.Check(os.WriteFile(ts.MkAbs(args[0]), []byte(conf+"}"), 0o600))
	},
	// version ARGUMENT...: runs the plugin as a human does.
	"version": func(ts *testscript.TestScript, _ bool, args []string) {
		cmd := exec.Command(filepath.Join(bin, "coil"), args...)
		cmd.Env = []string{"PATH=/"} // an empty list would be that of this process
		cmd.Stdout, cmd.Stderr = ts.Stdout(), ts.Stderr()
		ts.Check(cmd.Run())
	},
	// coil EXITCODE COMMAND [FILE]: runs the plugin with FILE on standard input.
	"coil": func(ts *testscript.TestScript, _ bool, args []string) {
		want, err := strconv.Atoi(args[0])
		ts.Check(err)
		cmd := exec.Command(filepath.Join(bin, "coil"))
		for _, name := range []string{"CNI_PATH", "CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS"} {
			if v := ts.Getenv(name); v != "unset" {
				cmd.Env = append(cmd.Env, name+"="+v)
			}
		}
		if args[1] != "unset" {
			cmd.Env = append(cmd.Env, "CNI_COMMAND="+args[1])
		}
		if len(args) > 2 {
			ts.Value(key{}).(*running).stdin = ts.ReadFile(args[2])
			cmd.Stdin = strings.NewReader(ts.ReadFile(args[2]))
		}
		var stdout, stderr bytes.Buffer
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		if err := cmd.Run(); err != nil && !errors.As(err, new(*exec.ExitError)) {
			ts.Fatalf("run: %v", err)
		}
		if stdout.Len() > 0 { // results end without a newline, unlike files of a script
			fmt.Fprintln(ts.Stdout(), strings.TrimSuffix(stdout.String(), "\n"))
		}
		ts.Stderr().Write(stderr.Bytes())
		if got := cmd.ProcessState.ExitCode(); got != want {
			ts.Fatalf("exit code is %d, want %d; standard error is %q", got, want, stderr.String())
		}
	},
	// coild start | stop | fails GRPCCODE MESSAGE | refuses CNICODE MESSAGE DETAILS |
	// answers FILE: controls the daemon.
	"coild": func(ts *testscript.TestScript, _ bool, args []string) {
		r := ts.Value(key{}).(*running)
		r.end()
		d := &daemon{answer: result}
		switch args[0] {
		case "stop":
			return
		case "start":
		case "fails":
			code, err := strconv.Atoi(args[1])
			ts.Check(err)
			d.fail = status.Error(codes.Code(code), args[2])
		case "refuses":
			code, err := strconv.Atoi(args[1])
			ts.Check(err)
			d.fail = cniError(cnirpc.ErrorCode(code), args[2], args[3])
		case "answers":
			d.answer = ts.ReadFile(args[1])
		default:
			ts.Fatalf("coild %s: unknown", args[0])
		}
		stop, err := d.serve(ts.Getenv("SOCKET"))
		ts.Check(err)
		r.daemon, r.stop = d, stop
	},
	// asked: prints what the daemon was asked since the last time, one member a line.
	"asked": func(ts *testscript.TestScript, _ bool, _ []string) {
		out := ts.Stdout()
		for _, c := range ts.Value(key{}).(*running).daemon.take() {
			fmt.Fprintf(out, "%s container=%s netns=%s ifname=%s path=%s\n", c.method, c.in.ContainerId, c.in.Netns, c.in.Ifname, c.in.Path)
			for _, k := range slices.Sorted(maps.Keys(c.in.Args)) {
				fmt.Fprintf(out, "arg %s=%s\n", k, c.in.Args[k])
			}
			for _, ip := range c.in.Ips {
				fmt.Fprintf(out, "ip %s\n", ip)
			}
			for _, k := range slices.Sorted(maps.Keys(c.in.Interfaces)) {
				fmt.Fprintf(out, "interface %s sandbox=%v\n", k, c.in.Interfaces[k])
			}
			if string(c.in.StdinData) == ts.Value(key{}).(*running).stdin {
				fmt.Fprintln(out, "stdin as it was given")
			}
		}
	},
}
