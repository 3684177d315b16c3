package lbgateway

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/atomicfile"
	plan "github.com/coil-net/coil/pkg/plan/lbgateway"
)

// saveAfter is for how long changes are collected before they are saved.
const saveAfter = 10 * time.Second

// saved is what a gateway did, in a file.
type saved struct {
	At       time.Time                  `json:"at"`
	Gateway  string                     `json:"gateway"`
	Spec     v2.LoadBalancerGatewaySpec `json:"spec"`
	Forwards map[string][]plan.Forward  `json:"forwards"` // by Service
}

// save writes what the gateway does into the file.
func (g *Gateway) save(_ context.Context, _ struct{}) error {
	g.mu.Lock()
	does := g.does
	g.mu.Unlock()
	if g.cfg.File == "" || does.generation == 0 {
		return nil
	}
	s := saved{At: g.now().UTC(), Gateway: g.cfg.Name, Spec: does.spec, Forwards: map[string][]plan.Forward{}}
	for key, is := range does.services {
		s.Forwards[key] = is.forwards
	}
	text, err := json.Marshal(s)
	if err == nil {
		err = atomicfile.Write(g.cfg.File, text, 0o600)
	}
	if err != nil {
		return fmt.Errorf("save what the gateway does: %w", err)
	}
	g.metrics.saved.Set(float64(s.At.Unix()))
	return nil
}

// restore does what the file says, and guards what keepalived may have beside that: addresses that came after the file was written, or went while keepalived kept them.
func (g *Gateway) restore(ctx context.Context) error {
	does, at, err := g.saved()
	if err != nil {
		does = nothing()
	}
	if g.cfg.VRRP != nil {
		left, e := g.cfg.VRRP.Addresses()
		err = errors.Join(err, e)
		for _, a := range left {
			does.guarded[a] = true
		}
	}
	if !does.needsTable() {
		return err
	}
	if _, e := g.cfg.Table.Sync(ctx, does.ruleset()); e != nil {
		return errors.Join(err, e)
	}
	g.does = does
	if !at.IsZero() {
		g.metrics.saved.Set(float64(at.Unix()))
	}
	return err
}

// saved reads the file, and when it was written. There may be none.
func (g *Gateway) saved() (does state, at time.Time, err error) {
	does = nothing()
	if g.cfg.File == "" {
		return does, at, nil
	}
	text, err := os.ReadFile(g.cfg.File)
	if errors.Is(err, fs.ErrNotExist) {
		return does, at, nil
	}
	var s saved
	if err == nil {
		err = json.Unmarshal(text, &s)
	}
	if err != nil {
		return does, at, fmt.Errorf("read %s: %w", g.cfg.File, err)
	}
	if s.Gateway != g.cfg.Name {
		return does, at, fmt.Errorf("%s is of LoadBalancerGateway %s", g.cfg.File, s.Gateway)
	}
	does.spec = s.Spec
	does.shape.Masquerade, does.shape.Refuse = s.Spec.Masquerade != v2.MasqueradeNever, s.Spec.UnknownPorts == v2.UnknownPortsRefuse
	for key, forwards := range s.Forwards {
		is := service{forwards: forwards}
		does.services[key] = is
		does.hash += is.hash(key)
		for _, f := range forwards {
			does.forwards[frontOf(f)], does.addresses[f.Address] = f, true
			does.guarded[f.Address] = true
			does.shape = does.shape.With(f.Frontend)
		}
	}
	return does, s.At, nil
}
