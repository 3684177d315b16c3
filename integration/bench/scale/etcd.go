package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"sync"

	"github.com/coil-net/coil/integration/lab/controlplane"
)

// registry is the prefix of the keys that the API server writes.
const registry = "/registry/"

// writes counts those of one kind.
type writes struct {
	Count, Bytes int
}

func (w writes) minus(o writes) writes { return writes{w.Count - o.Count, w.Bytes - o.Bytes} }

// ledger counts, by a watch of etcd itself, the writes of keys with a prefix, and the bytes of the
// values as etcd stores them: protobuf of Kubernetes' own resources, JSON of Coil's. The end of an
// object is a write without a value. Leases and caches of the API server are not in between.
type ledger struct {
	close func()
	ended chan struct{}

	mu     sync.Mutex
	kinds  map[string]writes
	failed error
}

// watchEtcd counts from now on. kind names what a key is counted as; a key without a name isn't
// counted.
func watchEtcd(ctx context.Context, api *controlplane.API, prefix string, kind func(key string) string) (*ledger, error) {
	key := []byte(registry + prefix)
	end := bytes.Clone(key)
	end[len(end)-1]++
	body, err := json.Marshal(map[string]any{"create_request": map[string]any{"key": key, "range_end": end, "fragment": true}})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, api.EtcdURL()+"/v3/watch", bytes.NewReader(body))
	if err != nil {
		cancel()
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		cancel()
		return nil, fmt.Errorf("watch etcd: %w", err)
	}
	l := &ledger{ended: make(chan struct{}), kinds: map[string]writes{}}
	l.close = sync.OnceFunc(func() { cancel(); <-l.ended })
	created := make(chan error, 1)
	go func() {
		defer close(l.ended)
		defer resp.Body.Close()
		l.end(ctx, l.read(resp.Body, kind, created))
	}()
	select {
	case err = <-created:
	case <-l.ended:
		_, err = l.counts()
	}
	if err != nil {
		l.close()
		return nil, fmt.Errorf("watch etcd: %w", err)
	}
	return l, nil
}

// read counts the events of a watch until it ends.
func (l *ledger) read(body io.Reader, kind func(string) string, created chan<- error) error {
	for dec := json.NewDecoder(body); ; {
		var m struct {
			Error  json.RawMessage
			Result struct {
				Created, Canceled bool
				Events            []struct {
					KV struct{ Key, Value []byte }
				}
			}
		}
		if err := dec.Decode(&m); err != nil {
			return err
		}
		switch {
		case len(m.Error) > 0 || m.Result.Canceled:
			return fmt.Errorf("etcd ended the watch: %s", m.Error)
		case m.Result.Created:
			created <- nil
		}
		l.mu.Lock()
		for _, e := range m.Result.Events {
			if k := kind(string(e.KV.Key)); k != "" {
				w := l.kinds[k]
				l.kinds[k] = writes{w.Count + 1, w.Bytes + len(e.KV.Value)}
			}
		}
		l.mu.Unlock()
	}
}

func (l *ledger) end(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failed = err
}

// counts returns what was written so far, by kind.
func (l *ledger) counts() (map[string]writes, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	kinds := make(map[string]writes, len(l.kinds))
	for k, w := range l.kinds {
		kinds[k] = w
	}
	return kinds, l.failed
}
