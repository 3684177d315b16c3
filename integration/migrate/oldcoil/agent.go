package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go4.org/netipx"
)

// agent gives the addresses of one node.
type agent struct {
	etcd         *clientv3.Client
	node, prefix string
}

// pool and block are values of v1 in etcd.
type (
	pool struct {
		Subnets   []netip.Prefix `json:"subnets"`
		BlockSize int            `json:"block_size"`
	}
	block struct {
		Free  []netip.Prefix            `json:"free"`
		Nodes map[string][]netip.Prefix `json:"nodes"`
	}
)

// serve answers the plugin until ctx ends.
func serve(ctx context.Context, node, endpoint, prefix string) error {
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint}, DialTimeout: 10 * time.Second, Context: ctx})
	if err != nil {
		return err
	}
	defer c.Close()
	a := agent{etcd: c, node: node, prefix: prefix}
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /ip", func(w http.ResponseWriter, r *http.Request) {
		var at attachment
		if err := json.NewDecoder(r.Body).Decode(&at); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		g, err := a.give(r.Context(), at)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		_ = json.NewEncoder(w).Encode(g)
	})
	mux.HandleFunc("DELETE /ip/{container}", func(w http.ResponseWriter, r *http.Request) {
		if err := a.take(r.Context(), r.PathValue("container")); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	})
	srv := &http.Server{Handler: mux}
	context.AfterFunc(ctx, func() { srv.Close() })
	if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// give finds an address for a pod: of the pool with the name of its namespace, else of the default one.
func (a agent) give(ctx context.Context, at attachment) (given, error) {
	name := at.Namespace
	var p pool
	found, _, err := a.get(ctx, "pool/"+name, &p)
	if err == nil && !found {
		name = "default"
		found, _, err = a.get(ctx, "pool/"+name, &p)
	}
	if err != nil || !found {
		return given{}, fmt.Errorf("pool %s: found %t: %w", name, found, err)
	}
	value, err := json.Marshal(map[string]any{
		"container_id": at.Container, "namespace": at.Namespace, "pod": at.Pod, "created_at": time.Now().UTC(),
	})
	if err != nil {
		return given{}, err
	}
	for {
		for _, s := range p.Subnets {
			g, err := a.giveOf(ctx, fmt.Sprintf("block/%s/%s", name, s.Addr()), string(value))
			if err != nil || g.Address != "" {
				return g, err
			}
		}
		if err := a.acquire(ctx, name, p); err != nil {
			return given{}, err
		}
	}
}

// giveOf takes the first free address of the node's blocks of one key, if there is one.
func (a agent) giveOf(ctx context.Context, key, value string) (given, error) {
	var b block
	if _, _, err := a.get(ctx, key, &b); err != nil {
		return given{}, err
	}
	for _, held := range b.Nodes[a.node] {
		addr := held.Addr()
		for offset := 0; held.Contains(addr); offset, addr = offset+1, addr.Next() {
			k := fmt.Sprintf("%sip/%s/%d", a.prefix, held.Addr(), offset)
			done, err := a.etcd.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(k), "=", 0)).Then(clientv3.OpPut(k, value)).Commit()
			if err != nil {
				return given{}, err
			}
			if done.Succeeded {
				return given{Address: addr.String(), Block: held.String()}, nil
			}
		}
	}
	return given{}, nil
}

// acquire takes a free block of a pool for the node.
func (a agent) acquire(ctx context.Context, name string, p pool) error {
	for _, s := range p.Subnets {
		key := fmt.Sprintf("block/%s/%s", name, s.Addr())
		var b block
		_, revision, err := a.get(ctx, key, &b)
		if err != nil {
			return err
		}
		if len(b.Free) == 0 {
			continue
		}
		taken := netip.PrefixFrom(b.Free[0].Addr(), 32-p.BlockSize)
		var rest netipx.IPSetBuilder
		for _, f := range b.Free {
			rest.AddPrefix(f)
		}
		rest.RemovePrefix(taken)
		set, err := rest.IPSet()
		if err != nil {
			return err
		}
		b.Free = append([]netip.Prefix{}, set.Prefixes()...)
		if b.Nodes == nil {
			b.Nodes = map[string][]netip.Prefix{}
		}
		b.Nodes[a.node] = append(b.Nodes[a.node], taken)
		value, err := json.Marshal(b)
		if err != nil {
			return err
		}
		k := a.prefix + key
		_, err = a.etcd.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(k), "=", revision)).Then(clientv3.OpPut(k, string(value))).Commit()
		return err // after a conflict with another node the caller looks again
	}
	return fmt.Errorf("pool %s has no block left", name)
}

// take frees the address of a container.
func (a agent) take(ctx context.Context, container string) error {
	all, err := a.etcd.Get(ctx, a.prefix+"ip/", clientv3.WithPrefix())
	if err != nil {
		return err
	}
	for _, kv := range all.Kvs {
		if strings.Contains(string(kv.Value), container) {
			_, err := a.etcd.Delete(ctx, string(kv.Key))
			return err
		}
	}
	return nil
}

// get reads a value of v1; revision is that of its last change.
func (a agent) get(ctx context.Context, key string, into any) (found bool, revision int64, err error) {
	got, err := a.etcd.Get(ctx, a.prefix+key)
	if err != nil || len(got.Kvs) == 0 {
		return false, 0, err
	}
	return true, got.Kvs[0].ModRevision, json.Unmarshal(got.Kvs[0].Value, into)
}
