package cniplugin

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/cniconf/spec"
)

// The test's program is the reference too: the CNI project's skeleton of a plugin, with
// commands that succeed. It works on the process' own environment and files.
func TestMain(m *testing.M) {
	if os.Getenv("COIL_TEST_SKELETON") == "" {
		os.Exit(m.Run())
	}
	done := func(*skel.CmdArgs) error { return nil }
	err := skel.PluginMainFuncsWithError(skel.CNIFuncs{Add: done, Del: done, Check: done, GC: done, Status: done},
		version.PluginSupports(spec.Versions()...), "about")
	if err == nil {
		os.Exit(0)
	}
	_ = err.Print()
	os.Exit(1)
}

// verdict is what becomes of a command.
type verdict struct {
	Code    uint
	Msg     string
	Details string
}

// skeleton is the verdict of the CNI project's library.
func skeleton(t *testing.T, env environ) verdict {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = []string{"COIL_TEST_SKELETON=1", "GORACE=" + os.Getenv("GORACE")}
	for k, v := range env {
		if k != "stdin" {
			cmd.Env = append(cmd.Env, k+"="+v)
		}
	}
	cmd.Stdin = strings.NewReader(env["stdin"])
	out, err := cmd.Output()
	if err == nil {
		return verdict{}
	}
	var e types.Error
	if !errors.As(err, new(*exec.ExitError)) || json.Unmarshal(out, &e) != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return verdict{e.Code, e.Msg, e.Details}
}

func ours(env environ) verdict {
	_, err := readCommand(env.get, strings.NewReader(env["stdin"]))
	var e *spec.Error
	if errors.As(err, &e) {
		return verdict{e.Code, e.Msg, e.Details}
	}
	return verdict{}
}

// The CNI project's library refuses the same commands for plugins, and lets the same pass.
func TestCommandsAreJudgedAsByTheSkeleton(t *testing.T) {
	conf := func(members string) string { return `{"cniVersion":"1.1.0","name":"n","type":"coil"` + members + `}` }
	edits := map[string]environ{
		"as it should be":      {},
		"no container ID":      {"CNI_CONTAINERID": ""},
		"path as container ID": {"CNI_CONTAINERID": "../x"},
		"dot as container ID":  {"CNI_CONTAINERID": ".x"},
		"odd container ID":     {"CNI_CONTAINERID": "a_B.c-0"},
		"container ID é":       {"CNI_CONTAINERID": "é"},
		"no netns":             {"CNI_NETNS": ""},
		"no interface":         {"CNI_IFNAME": ""},
		"long interface":       {"CNI_IFNAME": "a234567890123456"},
		"longest interface":    {"CNI_IFNAME": "a23456789012345"},
		"interface ..":         {"CNI_IFNAME": ".."},
		"interface with space": {"CNI_IFNAME": "a\u2003b"},
		"interface with colon": {"CNI_IFNAME": "a:b"},
		"no path":              {"CNI_PATH": ""},
		"nothing":              {"CNI_PATH": "", "CNI_CONTAINERID": "", "CNI_IFNAME": "", "CNI_NETNS": ""},
		"bad and missing":      {"CNI_PATH": "", "CNI_CONTAINERID": "/"},
		"no network name":      {"stdin": `{"cniVersion":"1.1.0"}`},
		"odd network name":     {"stdin": `{"cniVersion":"1.1.0","name":"a b"}`},
		"no version":           {"stdin": `{"name":"n"}`},
		"version 0.3.0":        {"stdin": strings.Replace(conf(""), "1.1.0", "0.3.0", 1)},
		"version 0.3.1":        {"stdin": strings.Replace(conf(""), "1.1.0", "0.3.1", 1)},
		"version 0.4.0":        {"stdin": strings.Replace(conf(""), "1.1.0", "0.4.0", 1)},
		"version 1.0.0":        {"stdin": strings.Replace(conf(""), "1.1.0", "1.0.0", 1)},
		"version 1.2.0":        {"stdin": strings.Replace(conf(""), "1.1.0", "1.2.0", 1)},
	}
	for name, edit := range edits {
		t.Run(name, func(t *testing.T) {
			for _, v := range []verb{verbAdd, verbDel, verbCheck, verbGC, verbStatus, verbVersion, "BURN"} {
				env := environ{
					"CNI_COMMAND": string(v), "CNI_CONTAINERID": "c", "CNI_NETNS": "/ns", "CNI_IFNAME": "eth0", "CNI_PATH": "/p", "stdin": conf(""),
				}
				maps.Copy(env, edit)
				want, got := skeleton(t, env), ours(env)
				if v == verbCheck || v == verbGC || v == verbStatus {
					// Of a version that the plugin doesn't speak the library says in two ways that it
					// doesn't.
					if want.Code == got.Code && got.Code == spec.CodeIncompatibleVersion {
						want = got
					}
				}
				if d := cmp.Diff(want, got); d != "" {
					t.Errorf("%s (-skeleton +ours):\n%s", v, d)
				}
			}
		})
	}
}

// Malformed input has the library's code, though not its words.
func TestMalformedInput(t *testing.T) {
	for _, stdin := range []string{"", "{", "[]", `"x"`, `{"name":1}`, `{"name":"n","cniVersion":1}`, `{"name":"n"} x`, "{\"name\":\"\x01\"}"} {
		env := environ{"CNI_COMMAND": "DEL", "CNI_CONTAINERID": "c", "CNI_IFNAME": "eth0", "CNI_PATH": "/p", "stdin": stdin}
		if want, got := skeleton(t, env), ours(env); got.Code != want.Code {
			t.Errorf("%q: code %d (%s), the library's is %d (%s)", stdin, got.Code, got.Msg, want.Code, want.Msg)
		}
	}
}

func TestInputThatCannotBeRead(t *testing.T) {
	env := environ{"CNI_COMMAND": "STATUS", "CNI_PATH": "/p"}
	_, err := readCommand(env.get, io.MultiReader(strings.NewReader("{"), brokenReader{}))
	mustCode(t, err, spec.CodeIOFailure)
}

type brokenReader struct{}

func (brokenReader) Read([]byte) (int, error) { return 0, errors.New("broken") }

func TestVersionIsThatOfTheLibrary(t *testing.T) {
	var out, want bytes.Buffer
	if err := version.PluginSupports(spec.Versions()...).Encode(&want); err != nil {
		t.Fatal(err)
	}
	env := environ{"CNI_COMMAND": "VERSION"}
	if err := (Plugin{Stdout: &out}).Main(env.get, brokenReader{}); err != nil {
		t.Fatal(err)
	}
	if out.String() != want.String() {
		t.Errorf("wrote %q, the library writes %q", out.String(), want.String())
	}
}
