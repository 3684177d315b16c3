package assign

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/store"
)

func TestAddAnswersAsCNIWants(t *testing.T) {
	b := newBench(t)
	alloc, err := b.Add(t.Context(), request("c1"))
	if err != nil {
		t.Fatal(err)
	}
	var r types100.Result
	if err := json.Unmarshal(alloc.Result, &r); err != nil {
		t.Fatal(err)
	}
	if len(r.Interfaces) != 2 || r.Interfaces[1].Name != "eth0" || r.Interfaces[1].Sandbox != "/run/netns/c1" || r.Interfaces[1].Mac == "" {
		t.Errorf("interfaces %+v", r.Interfaces)
	}
	var ips []string
	for _, ip := range r.IPs {
		if ip.Interface == nil || *ip.Interface != 1 {
			t.Errorf("address %v is not of the pod's interface", ip)
		}
		ips = append(ips, ip.Address.String()+" via "+ip.Gateway.String())
	}
	if got, want := strings.Join(ips, ", "), "10.1.0.0/32 via 169.254.1.1, fd00::/128 via fe80::1"; got != want {
		t.Errorf("addresses %s, want %s", got, want)
	}
	if len(r.Routes) != 2 || r.Routes[0].Dst.String() != "0.0.0.0/0" || r.Routes[1].Dst.String() != "::/0" {
		t.Errorf("routes %+v", r.Routes)
	}
	b.mustAgree(t, "c1")
}

func TestAddTwiceIsOneAddress(t *testing.T) {
	b := newBench(t)
	first, err := b.Add(t.Context(), request("c1"))
	if err != nil {
		t.Fatal(err)
	}
	second, err := b.Add(t.Context(), request("c1"))
	if err != nil {
		t.Fatal(err)
	}
	if first.Address != second.Address || string(first.Result) != string(second.Result) || b.net.wired != 1 {
		t.Errorf("%s then %s, wired %d times; want the recorded answer", first.Address, second.Address, b.net.wired)
	}
	// When the kernel lost it, the same address is wired again.
	b.net.setFail("Check", errors.New("route is missing"))
	third, err := b.Add(t.Context(), request("c1"))
	if err != nil {
		t.Fatal(err)
	}
	if third.Address != first.Address || b.net.wired != 2 {
		t.Errorf("%s, wired %d times; want %s wired again", third.Address, b.net.wired, first.Address)
	}
	b.net.setFail("Check", nil)
	if _, err := b.Add(t.Context(), request("c1")); err != nil || b.net.wired != 2 {
		t.Errorf("wired %d times, %v; want the answer of the second wiring", b.net.wired, err)
	}
	b.mustAgree(t, "c1")
}

// Finish, which completes the network of a pod, comes when all else is done, each time, and undoes all when it
// fails.
func TestAddFinishes(t *testing.T) {
	b := newBench(t)
	var finished []node.Sandbox
	r := request("c1")
	r.Finish = func(_ context.Context, s node.Sandbox) error {
		if alloc, err := b.store.Get(t.Context(), s.ID); err != nil || alloc.State != store.Attached {
			t.Errorf("it isn't recorded yet: %+v, %v", alloc, err)
		}
		finished = append(finished, s)
		return nil
	}
	alloc, err := b.Add(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Add(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	want := node.Sandbox{ID: r.ID, Pod: r.Pod, Netns: r.Netns, Address: alloc.Address}
	if len(finished) != 2 || finished[0] != want || finished[1] != want {
		t.Errorf("finished %+v, want twice %+v", finished, want)
	}
	b.mustAgree(t, "c1")

	broken := request("c2")
	broken.Finish = func(context.Context, node.Sandbox) error { return errors.New("no tunnel") }
	if _, err := b.Add(t.Context(), broken); err == nil || !strings.Contains(err.Error(), "no tunnel") {
		t.Errorf("error %v", err)
	}
	b.mustAgree(t, "c1")
}

// Of a pod that was found in the kernel the record knows neither the namespace nor
// what ADD answered.
func TestAddOfAnAdoptedPod(t *testing.T) {
	b := newBench(t)
	addr := ipam.Address{IPv4: netip.MustParseAddr("10.1.0.2"), IPv6: netip.MustParseAddr("fd00::2")}
	r := request("c1")
	found := store.Allocation{ID: r.ID, Pool: "default", Address: addr, State: store.Attached, Wiring: store.Wiring{HostIfName: "vethx", HostIfIndex: 3}}
	if err := b.store.Adopt(t.Context(), found); err != nil {
		t.Fatal(err)
	}
	got, err := b.Add(t.Context(), r)
	if err != nil || got.Address != addr || len(got.Result) == 0 {
		t.Fatalf("%s, result %s, %v; want the pod wired with its address", got.Address, got.Result, err)
	}
	rec, err := b.store.Get(t.Context(), r.ID)
	if err != nil || rec.Netns != r.Netns || rec.Pod != r.Pod || string(rec.Result) != string(got.Result) {
		t.Errorf("recorded %+v, %v; want what ADD told", rec, err)
	}
	b.mustAgree(t, "c1")
}

// A caller that goes away must not cost a pod its network.
func TestAbandonedAddOfAnAttachedPod(t *testing.T) {
	b := newBench(t)
	if _, err := b.Add(t.Context(), request("c1")); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	b.net.enter = func(_ context.Context, method string) {
		if method == "Check" {
			cancel()
		}
	}
	if _, err := b.Add(ctx, request("c1")); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	b.mustAgree(t, "c1")
}

func TestSandboxMadeAgain(t *testing.T) {
	b := newBench(t)
	if _, err := b.Add(t.Context(), request("c1")); err != nil {
		t.Fatal(err)
	}
	again := request("c1")
	again.Netns.Inode = 8
	if _, err := b.Add(t.Context(), again); err != nil {
		t.Fatal(err)
	}
	got, err := b.store.Get(t.Context(), again.ID)
	if err != nil || got.Netns.Inode != 8 {
		t.Errorf("recorded %+v, %v; want the new namespace", got.Netns, err)
	}
	b.mustAgree(t, "c1")
}

func TestFailedAddLeavesNothing(t *testing.T) {
	for _, method := range []string{"Attach"} {
		t.Run(method, func(t *testing.T) {
			b := newBench(t)
			b.net.setFail(method, errors.New("netlink: out of memory"))
			_, err := b.Add(t.Context(), request("c1"))
			if err == nil || !strings.Contains(err.Error(), "out of memory") {
				t.Errorf("error %v does not say what happened", err)
			}
			b.mustAgree(t)
		})
	}
}

func TestAbandonedAddLeavesNothing(t *testing.T) {
	b := newBench(t)
	ctx, cancel := context.WithCancel(t.Context())
	b.net.enter = func(_ context.Context, method string) {
		if method == "Attach" {
			cancel()
		}
	}
	if _, err := b.Add(ctx, request("c1")); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	b.mustAgree(t)
}

// A caller that goes away after the wiring must not leave an address behind.
func TestAddAbandonedAtTheEnd(t *testing.T) {
	b := newBench(t)
	ctx, cancel := context.WithCancel(t.Context())
	real := b.Assigner.net
	b.Assigner.net = cancelAfterAttach{real, cancel}
	if _, err := b.Add(ctx, request("c1")); err == nil {
		t.Error("an ADD that nobody waits for succeeded")
	}
	b.mustAgree(t)
}

type cancelAfterAttach struct {
	Network
	cancel context.CancelFunc
}

func (c cancelAfterAttach) Attach(ctx context.Context, p podnet.Pod, l *podnet.Link) (podnet.Attachment, error) {
	defer c.cancel()
	return c.Network.Attach(ctx, p, l)
}

func TestPoolWithoutAddresses(t *testing.T) {
	b := newBench(t)
	for i := range 4 {
		if _, err := b.Add(t.Context(), request(fmt.Sprint("c", i))); err != nil {
			t.Fatal(err)
		}
	}
	_, err := b.Add(t.Context(), request("c4"))
	if !errors.Is(err, node.ErrUnavailable) || !errors.Is(err, errPoolEmpty) {
		t.Errorf("error %v, want ErrUnavailable with the reason", err)
	}
	// The address that was freed just now is better than none, also if its link is
	// still there.
	if err := b.Del(t.Context(), request("c2").ID); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Add(t.Context(), request("c4")); err != nil {
		t.Errorf("with a cooling address: %v", err)
	}
	b.mustAgree(t, "c0", "c1", "c3", "c4")
}

func TestBlockThatDoesNotCome(t *testing.T) {
	b := newBench(t)
	b.supply.usable = nil
	b.cfg.BlockTimeout = 20 * time.Millisecond
	b.supply.ask = func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
	_, err := b.Add(t.Context(), request("c1"))
	if !errors.Is(err, node.ErrUnavailable) || !strings.Contains(err.Error(), "coil-ipam-controller") || !strings.Contains(err.Error(), `"default"`) {
		t.Errorf("error %v, want one that names the pool and what to look at", err)
	}
	b.mustAgree(t)
}

func TestManyAddsAtOnce(t *testing.T) {
	b := newBench(t)
	block := store.Block{Name: "default-1", Pool: "default", Block: ipam.Block{
		IPv4: netip.MustParsePrefix("10.2.0.0/25"), IPv6: netip.MustParsePrefix("fd01::/121"),
	}}
	if err := b.store.SetBlocks(t.Context(), []store.Block{block}); err != nil {
		t.Fatal(err)
	}
	b.supply.usable = []string{"default-1"}
	var mu sync.Mutex
	seen := map[ipam.Address]string{}
	var wg sync.WaitGroup
	var want []string
	for i := range 100 {
		c := fmt.Sprint("c", i)
		if i%2 == 0 {
			want = append(want, c)
		}
		wg.Go(func() {
			alloc, err := b.Add(t.Context(), request(c))
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			if other, ok := seen[alloc.Address]; ok {
				t.Errorf("%s was given to %s and %s", alloc.Address, other, c)
			}
			seen[alloc.Address] = c
			mu.Unlock()
			if i%2 == 1 {
				if err := b.Del(t.Context(), request(c).ID); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	b.mustAgree(t, want...)
}

func TestCheck(t *testing.T) {
	b := newBench(t)
	id := request("c1").ID
	if err := b.Check(t.Context(), id, "", nil); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("unknown container: %v", err)
	}
	alloc, err := b.Add(t.Context(), request("c1"))
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Check(t.Context(), id, "", alloc.Address.Addrs()); err != nil {
		t.Errorf("intact: %v", err)
	}
	wrong := netip.MustParseAddr("192.0.2.1")
	b.net.setFail("Check", errors.New("route is missing"))
	b.net.setFail("CheckGuard", errors.New("rule is missing"))
	err = b.Check(t.Context(), id, "", []netip.Addr{wrong})
	for _, want := range []string{"192.0.2.1", "route is missing", "rule is missing"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want all that is wrong", err)
		}
	}
	// A rule of the node is no reason to wire a pod again.
	b.net.setFail("Check", nil)
	if _, err := b.Add(t.Context(), request("c1")); err != nil || b.net.wired != 1 {
		t.Errorf("ADD again: wired %d times, %v", b.net.wired, err)
	}
}
