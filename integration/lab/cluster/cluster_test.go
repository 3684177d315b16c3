package cluster

import (
	"context"
	"errors"
	"io"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestNodeNames(t *testing.T) {
	got := []string{nodeName("coil", 0), nodeName("coil", 1), nodeName("coil", 2), nodeName("other", 10)}
	want := []string{"coil-control-plane", "coil-worker", "coil-worker2", "other-worker10"}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
}

func TestAddressPlan(t *testing.T) {
	for _, tc := range []struct{ got, want string }{
		{IPv4.node(0).String(), "172.30.0.10/24"},
		{IPv4.node(MaxNodes - 1).String(), "172.30.0.209/24"},
		{IPv6.node(0).String(), "fd00:172:30::10/64"},
		{IPv6.node(MaxNodes - 1).String(), "fd00:172:30::209/64"},
		{IPv4.podSubnet(7).String(), "10.244.7.0/24"},
		{IPv6.podSubnet(7).String(), "fd00:10:244:7::/64"},
	} {
		if tc.got != tc.want {
			t.Errorf("got %s, want %s", tc.got, tc.want)
		}
	}
	for f, p := range plans {
		for _, other := range []string{p.service.String(), p.pods.String()} {
			if strings.HasPrefix(other, p.fabric.Masked().Addr().String()) {
				t.Errorf("%s: %s is inside the fabric %s", f, other, p.fabric)
			}
		}
	}
}

func TestOptionsValidate(t *testing.T) {
	ok := Options{}
	ok.defaults()
	if err := ok.Validate(); err != nil {
		t.Fatalf("the defaults are refused: %v", err)
	}
	for name, change := range map[string]func(*Options){
		"a name that isn't a path element": func(o *Options) { o.Name = "../x" },
		"a name that is too long":          func(o *Options) { o.Name = strings.Repeat("a", 21) },
		"no nodes":                         func(o *Options) { o.Nodes = -1 },
		"too many nodes":                   func(o *Options) { o.Nodes = MaxNodes + 1 },
		"a family twice":                   func(o *Options) { o.Families = []Family{IPv4, IPv4} },
		"a control plane without a link": func(o *Options) {
			o.ControlPlane = &Remote{Dir: "/tmp", Addr: netip.MustParseAddrPort("10.0.2.2:6443"), Local: netip.MustParsePrefix("10.0.2.15/24")}
		},
		"a control plane of another family": func(o *Options) {
			o.ControlPlane = &Remote{Dir: "/tmp", Link: "eth0", Addr: netip.MustParseAddrPort("[::1]:6443"), Local: netip.MustParsePrefix("10.0.2.15/24")}
		},
		"an image that doesn't exist": func(o *Options) { o.Images = []string{"/no/such.tar"} },
	} {
		t.Run(name, func(t *testing.T) {
			o := ok
			change(&o)
			if err := o.Validate(); err == nil {
				t.Error("accepted")
			}
		})
	}
}

func TestOpenWithoutCluster(t *testing.T) {
	_, err := Open(t.TempDir(), "nobody")
	if err == nil || !strings.Contains(err.Error(), "lab up --name nobody") {
		t.Errorf("error is %v, want one that tells how to make it", err)
	}
}

func TestLockIsRemovedWithoutARace(t *testing.T) {
	state := t.TempDir() + "/state"
	dir := state + "/c"
	unlock, err := lock(t.Context(), dir, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var told strings.Builder
	cancel()
	if _, err := lock(ctx, dir, &told); !errors.Is(err, context.Canceled) {
		t.Errorf("taking a held lock: %v, want canceled", err)
	}
	if !strings.Contains(told.String(), "waiting") {
		t.Error("nobody was told about the wait")
	}
	// A process that opened the file before it was removed must not believe that it holds the lock.
	next := make(chan error, 1)
	go func() {
		again, err := lock(t.Context(), dir, io.Discard)
		if err == nil {
			_, err = os.Stat(dir + ".lock")
			err = errors.Join(err, again())
		}
		next <- err
	}()
	if err := unlock(); err != nil {
		t.Fatal(err)
	}
	if err := <-next; err != nil {
		t.Errorf("the next holder has no lock file: %v", err)
	}
	if _, err := os.Stat(state); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without a cluster the state directory is left: %v", err)
	}
}

func TestLockStaysWithItsCluster(t *testing.T) {
	dir := t.TempDir() + "/c"
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	unlock, err := lock(t.Context(), dir, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if err := unlock(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dir + ".lock"); err != nil {
		t.Errorf("the lock file of a cluster is gone: %v", err)
	}
}
