package machine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
)

// Operations of labinit's control socket: one request and one response in JSON per connection.
const (
	OpList  = "list"
	OpStart = "start"
	OpKill  = "kill"
)

// Request is what labinit is asked.
type Request struct {
	Op        string
	Component string
}

// Response is its answer.
type Response struct {
	Error      string
	Components []Status
}

// Status is that of one component.
type Status struct {
	Name     string
	PID      int // inside the machine; 0 when it doesn't run
	Wanted   bool
	Restarts int // unexpected ends
}

// Components asks what runs in the machine.
func (d Dir) Components(ctx context.Context) ([]Status, error) {
	r, err := d.call(ctx, Request{Op: OpList})
	return r.Components, err
}

// Control starts or kills a component; a killed one stays down until it is started again. It
// returns when the component has ended, or is being started.
func (d Dir) Control(ctx context.Context, op, component string) error {
	_, err := d.call(ctx, Request{Op: op, Component: component})
	return err
}

func (d Dir) call(ctx context.Context, req Request) (Response, error) {
	var resp Response
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", d.ControlSocket())
	if err != nil {
		return resp, err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	if err := json.NewEncoder(conn).Encode(req); err != nil {
		return resp, fmt.Errorf("%s %s: %w", req.Op, req.Component, err)
	}
	if err := json.NewDecoder(conn).Decode(&resp); err != nil {
		return resp, errors.Join(fmt.Errorf("%s %s: %w", req.Op, req.Component, err), ctx.Err())
	}
	if resp.Error != "" {
		return resp, fmt.Errorf("%s %s: %s", req.Op, req.Component, resp.Error)
	}
	return resp, nil
}
