package controlplane

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/coil-net/coil/pkg/etcd"
	"github.com/coil-net/coil/pkg/testkit"
)

const (
	// registry is where kube-apiserver keeps all objects in etcd.
	registry = "/registry/"
	// together is how many keys one transaction writes: etcd takes at most 128 (--max-txn-ops).
	together = 128
)

// SaveData writes all objects to a file, for Options.Data, as they are at one moment.
func (a *API) SaveData(ctx context.Context, file string) error {
	objects, _, err := etcd.Read(ctx, etcd.Options{Endpoints: []string{a.EtcdURL()}, Timeout: testkit.Timeout(10 * time.Second)}, registry)
	if err != nil {
		return err
	}
	content, err := json.Marshal(objects)
	if err != nil {
		return err
	}
	return os.WriteFile(file, content, 0o600)
}

// loadData writes the objects of a file into an empty etcd.
func (a *API) loadData(ctx context.Context) error {
	content, err := os.ReadFile(a.opts.Data)
	if err != nil {
		return err
	}
	var objects []etcd.KeyValue
	if err := json.Unmarshal(content, &objects); err != nil {
		return fmt.Errorf("read %s: %w", a.opts.Data, err)
	}
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{a.EtcdURL()}, Context: ctx, Logger: zap.NewNop()})
	if err != nil {
		return err
	}
	defer client.Close()
	for some := range slices.Chunk(objects, together) {
		var puts []clientv3.Op
		for _, o := range some {
			puts = append(puts, clientv3.OpPut(o.Key, string(o.Value)))
		}
		if _, err := client.Txn(ctx).Then(puts...).Commit(); err != nil {
			return fmt.Errorf("write into etcd: %w", err)
		}
	}
	return nil
}
