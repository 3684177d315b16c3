package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

	"k8s.io/apimachinery/pkg/types"
)

// plugin is a system whose CNI plugin is run for each command, as a container runtime
// does it: environment, configuration on standard input, result on standard output.
type plugin struct {
	title string
	host  *space
	// path of the program; CNI_PATH is its folder.
	path string
	// conf is the network configuration for a family.
	conf map[string]map[string]any
	// namespace is K8S_POD_NAMESPACE for a family.
	namespace map[string]string
	// uids has the UIDs, by K8S_POD_NAMESPACE and K8S_POD_NAME, of pods that have an object.
	uids sync.Map
	// idle plugins make nothing.
	idle bool
	stop func() error
	// spent is the processor time of the program's runs, in nanoseconds.
	spent atomic.Int64
}

func (g *plugin) name() string { return g.title }
func (g *plugin) node() *space { return g.host }
func (g *plugin) wires() bool  { return !g.idle }
func (g *plugin) checks() bool { return true }
func (g *plugin) close() error { return g.stop() }

func (g *plugin) add(_ context.Context, p *pod) error {
	p.result = nil
	out, err := g.run("ADD", p)
	if err == nil {
		p.result = out
	}
	return err
}

func (g *plugin) check(_ context.Context, p *pod) error {
	_, err := g.run("CHECK", p)
	return err
}

func (g *plugin) del(_ context.Context, p *pod) error {
	_, err := g.run("DEL", p)
	return err
}

// stdin is the configuration with the result of ADD, as runtimes pass it since CNI 0.4.
func (g *plugin) stdin(p *pod) ([]byte, error) {
	conf := g.conf[p.family]
	if len(p.result) > 0 {
		with := map[string]any{"prevResult": json.RawMessage(p.result)}
		for k, v := range conf {
			with[k] = v
		}
		conf = with
	}
	return json.Marshal(conf)
}

// run runs the program and returns its output. Both fit into a pipe, so that nobody
// has to copy while it runs.
func (g *plugin) run(command string, p *pod) ([]byte, error) {
	stdin, err := g.stdin(p)
	if err != nil {
		return nil, err
	}
	name := fmt.Sprintf("pod-%d", p.number)
	uid, known := g.uids.Load(types.NamespacedName{Namespace: g.namespace[p.family], Name: name})
	if !known {
		uid = types.UID("00000000-0000-4000-8000-000000000000") // who doesn't ask for the object doesn't care
	}
	inR, inW, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer inR.Close()
	_, err = inW.Write(stdin)
	if err := errors.Join(err, inW.Close()); err != nil {
		return nil, err
	}
	outR, outW, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer outR.Close()
	process, err := os.StartProcess(g.path, []string{g.path}, &os.ProcAttr{
		Env: []string{
			"CNI_COMMAND=" + command, "CNI_CONTAINERID=" + p.id, "CNI_NETNS=" + p.Path(), "CNI_IFNAME=" + ifName,
			"CNI_PATH=" + filepath.Dir(g.path), "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
			fmt.Sprintf("CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=%s;K8S_POD_NAME=%s;K8S_POD_INFRA_CONTAINER_ID=%s;K8S_POD_UID=%s",
				g.namespace[p.family], name, p.id, uid),
		},
		Files: []*os.File{inR, outW, outW},
	})
	if err := errors.Join(err, outW.Close()); err != nil {
		return nil, err
	}
	state, err := process.Wait()
	if err != nil {
		return nil, err
	}
	g.spent.Add(int64(state.UserTime() + state.SystemTime()))
	out, err := io.ReadAll(outR)
	if err == nil && !state.Success() {
		err = fmt.Errorf("%s of %s: %s: %s", command, g.title, state, out)
	}
	return out, err
}
