package main

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"

	"github.com/coil-net/coil/integration/lab/build"
)

// newEmpty is the floor of everybody who is a program: one that ends at once.
func newEmpty(ctx context.Context, b *build.Builder) (*plugin, error) {
	path, err := b.Own(ctx, "integration/bench/empty")
	if err != nil {
		return nil, err
	}
	host, err := newSpace()
	if err != nil {
		return nil, err
	}
	conf := map[string]any{"cniVersion": "1.0.0", "name": "bench", "type": "empty"}
	return &plugin{
		title: "exec", host: host, path: path, idle: true, stop: host.close,
		conf: map[string]map[string]any{ipv4: conf, dual: conf},
	}, nil
}

// newPTP is the CNI project's ptp with host-local, which keeps a file for each address.
func newPTP(ctx context.Context, b *build.Builder, dir string) (*plugin, error) {
	bin, err := b.Programs(ctx, "ptp", "host-local")
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	host, err := newSpace()
	if err != nil {
		return nil, err
	}
	type m = map[string]any
	ranges := []any{[]any{m{"subnet": "10.128.0.0/16"}}}
	routes := []any{m{"dst": "0.0.0.0/0"}}
	conf := func(name string, ranges, routes []any) m {
		return m{
			"cniVersion": "1.0.0", "name": name, "type": "ptp", "mtu": 1500,
			"ipam": m{"type": "host-local", "dataDir": filepath.Join(dir, name), "ranges": ranges, "routes": routes},
		}
	}
	return &plugin{
		title: "ptp", host: host, path: bin["ptp"], stop: host.close,
		conf: map[string]m{
			ipv4: conf(ipv4, ranges, routes),
			dual: conf(dual, append(ranges, []any{m{"subnet": "fd00:128::/112"}}), append(routes, m{"dst": "::/0"})),
		},
	}, nil
}

// builder builds what runs.
func builder(log io.Writer) *build.Builder { return &build.Builder{Log: log} }

// closeAll closes systems.
func closeAll(systems []system) error {
	var errs []error
	for _, s := range systems {
		errs = append(errs, s.close())
	}
	return errors.Join(errs...)
}
