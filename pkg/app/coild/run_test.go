package coild

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/coil-net/coil/pkg/cniconf"
	"github.com/coil-net/coil/pkg/observe"
	"github.com/coil-net/coil/pkg/testkit"
)

// An API server may be away for hours; coild waits for it rather than to end.
func TestUntilDoneNeverGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		tries := 0
		err := untilDone(t.Context(), func(context.Context) (bool, error) {
			tries++
			return time.Since(start) > time.Hour, nil
		})
		if took := time.Since(start); err != nil || took > time.Hour+15*time.Second || tries < 300 {
			t.Errorf("%d tries in %s: %v", tries, took, err)
		}
	})
}

func TestUntilDoneEnds(t *testing.T) {
	failed := errors.New("failed")
	if err := untilDone(t.Context(), func(context.Context) (bool, error) { return false, failed }); !errors.Is(err, failed) {
		t.Errorf("error %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	err := untilDone(ctx, func(context.Context) (bool, error) { cancel(); return false, nil })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v after the context ended", err)
	}
}

// Somebody may empty the folder of network configurations, and a container that is started
// again runs no installer: coild says so rather than to end again and again.
func TestConfThatIsGone(t *testing.T) {
	dir := t.TempDir()
	conf := filepath.Join(dir, cniconf.DefaultName)
	empty := func(t *testing.T) {
		t.Helper()
		files, err := filepath.Glob(filepath.Join(dir, "*"))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			if err := os.Remove(f); err != nil {
				t.Fatal(err)
			}
		}
	}
	synctest.Test(t, func(t *testing.T) {
		d := &daemon{Options: Options{CNIConfDir: dir, CNIConfName: cniconf.DefaultName}, health: observe.NewHealth()}
		ctx, cancel := context.WithCancel(t.Context())
		var group errgroup.Group
		defer func() {
			cancel()
			if err := group.Wait(); err != nil {
				t.Error(err)
			}
		}()
		d.startConf(ctx, &group)
		if err := d.health.Ready(); err == nil || !strings.Contains(err.Error(), "delete the pod") {
			t.Errorf("without a staged configuration coild's health is %v, want not ready, and what to do", err)
		}
		content := []byte(`{"cniVersion":"1.1.0","name":"n","plugins":[{"type":"coil"}]}`)
		if _, err := cniconf.Stage(dir, cniconf.DefaultName, content); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			time.Sleep(8 * time.Second)
			if got, err := os.ReadFile(conf); string(got) != string(content) || d.health.Ready() != nil {
				t.Errorf("in place is %q, %v; health %v; want what was staged, and ready", got, err, d.health.Ready())
			}
			empty(t)
		}
	})
}

// A kubeconfig says how the API server is reached, and nothing else does.
func TestConnectByKubeconfig(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "192.0.2.1") // as in a pod
	t.Setenv("KUBERNETES_SERVICE_PORT", "443")
	k := clientcmdapi.NewConfig()
	k.Clusters["c"] = &clientcmdapi.Cluster{Server: "https://192.0.2.2:6443"}
	k.Contexts["c"] = &clientcmdapi.Context{Cluster: "c"}
	k.CurrentContext = "c"
	o := &Options{Kubeconfig: filepath.Join(t.TempDir(), "kubeconfig"), StateDir: t.TempDir()}
	testkit.Check(t, clientcmd.WriteToFile(*k, o.Kubeconfig))
	clients, own, err := o.connect(t.Context())
	if err != nil || own != nil {
		t.Errorf("API servers' own addresses: %v, %v", own, err)
	} else if host := clients.Core.Get().URL().Host; host != "192.0.2.2:6443" {
		t.Errorf("the API server is at %s", host)
	}
}
