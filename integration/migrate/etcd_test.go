// Package migrate moves clusters from Coil v1 to this version, with a real etcd. It owns the cases of coil-migrator
// that need an etcd, an API server or nodes; whatever a smaller test can show is tested there.
package migrate

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/integration/lab/controlplane"
	"github.com/coil-net/coil/integration/lab/pki"
	"github.com/coil-net/coil/integration/lab/proc"
	"github.com/coil-net/coil/pkg/etcd"
	"github.com/coil-net/coil/pkg/testkit"
)

// store is Debian's etcd on this machine.
type store struct {
	endpoint string // host:port
	client   *clientv3.Client
	opts     etcd.Options
}

// startEtcd starts an etcd; with an authority, it speaks TLS only and wants certificates of clients.
func startEtcd(t *testing.T, ca *pki.Authority) *store {
	t.Helper()
	path, err := exec.LookPath("etcd")
	if err != nil {
		t.Fatalf("%v: hack/setup.sh test installs it", err)
	}
	dir := t.TempDir()
	s := &store{endpoint: testkit.FreeAddr(t)}
	scheme, args := "http", []string{
		"--data-dir=" + filepath.Join(dir, "data"), "--listen-peer-urls=http://" + testkit.FreeAddr(t), "--unsafe-no-fsync", "--log-level=error",
	}
	cfg := clientv3.Config{Endpoints: []string{s.endpoint}, DialTimeout: testkit.Timeout(10 * time.Second), Logger: zap.NewNop()}
	if ca != nil {
		scheme = "https"
		local := pki.Subject{User: "root", DNSNames: []string{"localhost"}, Addrs: []netip.Addr{netip.MustParseAddr("127.0.0.1")}}
		testkit.Check(t, ca.WriteCert(dir, "etcd", local), os.WriteFile(filepath.Join(dir, "ca.crt"), ca.CA(), 0o644))
		s.opts.CA, s.opts.Cert, s.opts.Key = filepath.Join(dir, "ca.crt"), filepath.Join(dir, "etcd.crt"), filepath.Join(dir, "etcd.key")
		args = append(args, "--cert-file="+s.opts.Cert, "--key-file="+s.opts.Key, "--trusted-ca-file="+s.opts.CA, "--client-cert-auth")
		cfg.TLS = testkit.Must(etcd.TLS(s.opts))(t)
	}
	url := scheme + "://" + s.endpoint
	s.opts.Endpoints, s.opts.Timeout = []string{url}, cfg.DialTimeout
	cfg.Endpoints = s.opts.Endpoints
	log := filepath.Join(dir, "etcd.log")
	p := testkit.Must(proc.Start(proc.Command{
		Path: path, Log: log,
		Args: append(args, "--listen-client-urls="+url, "--advertise-client-urls="+url),
	}))(t)
	t.Cleanup(p.Kill)
	t.Cleanup(func() {
		if text, err := os.ReadFile(log); t.Failed() {
			t.Logf("etcd's log (%v):\n%s", err, text)
		}
	})
	s.client = testkit.Must(clientv3.New(cfg))(t)
	t.Cleanup(func() { s.client.Close() })
	testkit.Eventually(t, 20*time.Second, "etcd answers", func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := s.client.Get(ctx, "x")
		return err
	})
	return s
}

// put writes keys below the prefix of Coil v1.
func (s *store) put(t *testing.T, data map[string]string) {
	t.Helper()
	for k, v := range data {
		testkit.Must(s.client.Put(t.Context(), "/coil/"+k, v))(t)
	}
}

// revision is that of etcd: it changes with each write.
func (s *store) revision(t *testing.T) int64 {
	t.Helper()
	return testkit.Must(s.client.Get(t.Context(), "x"))(t).Header.Revision
}

// small is what v1 has for one pool, of which one pod has an address.
func small() map[string]string {
	return map[string]string{
		"pool/default":           `{"subnets":["10.1.0.0/28"],"block_size":2}`,
		"subnet/10.1.0.0":        "",
		"block/default/10.1.0.0": `{"free":["10.1.0.8/29"],"nodes":{"n1":["10.1.0.4/30"],"n2":["10.1.0.0/30"]}}`,
		"ip/10.1.0.4/1":          "default/web",
	}
}

// built is the program, which is built once: even one that is up to date takes the go command a second.
var built = sync.OnceValues(func() (string, error) {
	return (&build.Builder{}).Own(context.Background(), "cmd/coil-migrator")
})

// migrator is the path of the program.
func migrator(t *testing.T) string {
	t.Helper()
	return testkit.Must(built())(t)
}

// run runs coil-migrator and returns what it writes.
func run(t *testing.T, kubeconfig string, env []string, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), migrator(t), args...)
	cmd.Env = append(append(os.Environ(), "KUBECONFIG="+kubeconfig), env...)
	var out, log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &log
	err = cmd.Run()
	return out.String(), log.String(), err
}

// TestReadEtcd reads more keys than one answer has, while others write: what is read is the state of one moment.
func TestReadEtcd(t *testing.T) {
	testkit.Need(t, testkit.APIServer)
	s := startEtcd(t, nil)
	const n = 2500
	value := func(round int) string { return fmt.Sprint("round ", round) }
	write := func(ctx context.Context, round int) error {
		for from := 0; from < n; from += 100 {
			var ops []clientv3.Op
			for i := from; i < from+100; i++ {
				ops = append(ops, clientv3.OpPut(fmt.Sprintf("/coil/%04d", i), value(round)))
			}
			if _, err := s.client.Txn(ctx).Then(ops...).Commit(); err != nil {
				return err
			}
		}
		return nil
	}
	testkit.Check(t, write(t.Context(), 0))
	testkit.Must(s.client.Put(t.Context(), "/coim", "beyond the prefix"))(t)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		for round := 1; ; round++ {
			if err := write(ctx, round); err != nil {
				done <- err
				return
			}
		}
	}()
	for range 20 {
		kvs, revision, err := etcd.Read(t.Context(), s.opts, "/coil/")
		if err != nil {
			t.Fatal(err)
		}
		at := testkit.Must(s.client.Get(t.Context(), "/coil/", clientv3.WithPrefix(), clientv3.WithRev(revision)))(t)
		if len(kvs) != n || len(at.Kvs) != n {
			t.Fatalf("%d keys, at revision %d there are %d, want %d", len(kvs), revision, len(at.Kvs), n)
		}
		for i, kv := range at.Kvs {
			if kvs[i].Key != string(kv.Key) || !bytes.Equal(kvs[i].Value, kv.Value) {
				t.Fatalf("key %d is %s=%s, at revision %d it is %s=%s", i, kvs[i].Key, kvs[i].Value, revision, kv.Key, kv.Value)
			}
		}
	}
	stop()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// TestDumpFromEtcd: with TLS, certificates and users, and without; and what it says when it can't.
func TestDumpFromEtcd(t *testing.T) {
	testkit.Need(t, testkit.APIServer)
	api := testkit.Must(controlplane.StartAPI(t.Context(), controlplane.Options{}))(t)
	t.Cleanup(func() { testkit.Check(t, api.Stop()) })
	ca, other := testkit.Must(pki.Open(t.TempDir()))(t), testkit.Must(pki.Open(t.TempDir()))(t)
	otherCA := filepath.Join(t.TempDir(), "other.crt")
	testkit.Check(t, os.WriteFile(otherCA, other.CA(), 0o644))

	open, closed := startEtcd(t, nil), startEtcd(t, ca)
	open.put(t, small())
	closed.put(t, small())
	for _, err := range []error{
		second(closed.client.RoleAdd(t.Context(), "reader")),
		second(closed.client.RoleGrantPermission(t.Context(), "reader", "/coil/", "/coil0", clientv3.PermissionType(clientv3.PermRead))),
		second(closed.client.UserAdd(t.Context(), "root", "secret")),
		second(closed.client.UserGrantRole(t.Context(), "root", "root")),
		second(closed.client.UserAdd(t.Context(), "migrator", "word")),
		second(closed.client.UserGrantRole(t.Context(), "migrator", "reader")),
		second(closed.client.AuthEnable(t.Context())),
	} {
		testkit.Check(t, err)
	}
	tls := []string{"--etcd-endpoints=https://" + closed.endpoint, "--etcd-tls-ca=" + closed.opts.CA, "--etcd-tls-cert=" + closed.opts.Cert, "--etcd-tls-key=" + closed.opts.Key}
	user := slices.Clip(append(slices.Clone(tls), "--etcd-username=migrator"))
	for name, c := range map[string]struct {
		args []string
		env  []string
		fail string // what standard error says; empty when it works
	}{
		"plain":            {args: []string{"--etcd-endpoints=http://" + open.endpoint}},
		"host and port":    {args: []string{"--etcd-endpoints=" + open.endpoint}},
		"one of two down":  {args: []string{"--etcd-endpoints=http://127.0.0.1:1,http://" + open.endpoint}},
		"TLS and user":     {args: append(user, "--etcd-password=word")},
		"password by env":  {args: user, env: []string{"COIL_ETCD_PASSWORD=word"}},
		"wrong password":   {args: append(user, "--etcd-password=other"), fail: "invalid user ID or password"},
		"other prefix":     {args: []string{"--etcd-endpoints=" + open.endpoint, "--etcd-prefix=/other/"}, fail: "--etcd-prefix"},
		"not allowed":      {args: append(user, "--etcd-password=word", "--etcd-prefix=/other/"), fail: "permission denied"},
		"other authority":  {args: append(user, "--etcd-password=word", "--etcd-tls-ca="+otherCA, "--etcd-timeout=2s"), fail: "certificate"},
		"no certificate":   {args: []string{"--etcd-endpoints=https://" + closed.endpoint, "--etcd-tls-ca=" + closed.opts.CA, "--etcd-timeout=2s"}, fail: "give --etcd-tls-cert"},
		"nobody there":     {args: []string{"--etcd-endpoints=http://127.0.0.1:1", "--etcd-timeout=1s"}, fail: "127.0.0.1:1"},
		"key without cert": {args: []string{"--etcd-tls-key=x"}, fail: "belong together"},
		"no such file":     {args: []string{"--etcd-tls-ca=/nowhere"}, fail: "/nowhere"},
	} {
		t.Run(name, func(t *testing.T) {
			before := open.revision(t)
			stdout, stderr, err := run(t, api.Kubeconfig(), c.env, append([]string{"dump", "--dry-run"}, c.args...)...)
			if c.fail != "" {
				if err == nil || !strings.Contains(stderr, c.fail) || stdout != "" {
					t.Errorf("error %v, want one that says %q:\n%s%s", err, c.fail, stderr, stdout)
				}
			} else if err != nil || !strings.Contains(stdout, "name: default-1\n") {
				t.Errorf("error %v:\n%s%s", err, stderr, stdout)
			}
			if after := open.revision(t); after != before {
				t.Errorf("etcd was at revision %d, and is at %d", before, after)
			}
		})
	}

	t.Run("damaged keys are named, and nothing is written", func(t *testing.T) {
		open.put(t, map[string]string{"ip/10.1.0.0/9": "default/late", "unknown": "x", "pool/second": "{"})
		file := filepath.Join(t.TempDir(), "coil.yaml")
		_, stderr, err := run(t, api.Kubeconfig(), nil, "dump", "--etcd-endpoints="+open.endpoint, "--output="+file)
		if err == nil {
			t.Fatalf("it took damaged data:\n%s", stderr)
		}
		for _, key := range []string{`"unknown"`, `"pool/second"`} {
			if !strings.Contains(stderr, key) {
				t.Errorf("key %s isn't named:\n%s", key, stderr)
			}
		}
		if _, err := os.Stat(file); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("a file was written: %v", err)
		}
	})
}

// second is the error of a call whose result isn't of interest.
func second[T any](_ T, err error) error { return err }
