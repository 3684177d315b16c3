package assign

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit"
)

func TestGCReleasesInTwoPhases(t *testing.T) {
	b := newBench(t)
	for _, c := range []string{"c1", "c2"} {
		if _, err := b.Add(t.Context(), request(c)); err != nil {
			t.Fatal(err)
		}
	}
	valid := []attachment.ID{request("c1").ID}
	now := time.Now().Add(time.Second)
	gc := func(after time.Duration) {
		t.Helper()
		if err := b.GC(t.Context(), valid, now.Add(after)); err != nil {
			t.Fatal(err)
		}
	}
	gc(-time.Hour) // called before c2 was attached
	gc(0)
	gc(suspicion / 2)
	b.mustAgree(t, "c1", "c2")
	gc(suspicion)
	b.mustAgree(t, "c1")
}

func TestGCForgetsASuspicion(t *testing.T) {
	b := newBench(t)
	if _, err := b.Add(t.Context(), request("c1")); err != nil {
		t.Fatal(err)
	}
	now := time.Now().Add(time.Second)
	listed := []attachment.ID{request("c1").ID}
	for i, valid := range [][]attachment.ID{nil, listed, nil} {
		if err := b.GC(t.Context(), valid, now.Add(time.Duration(i)*suspicion)); err != nil {
			t.Fatal(err)
		}
	}
	b.mustAgree(t, "c1")
}

func TestSweepNeverTrustsAFailedList(t *testing.T) {
	b := newBench(t)
	if _, err := b.Add(t.Context(), request("c1")); err != nil {
		t.Fatal(err)
	}
	b.net.setFail("Attached", errors.New("dump interrupted"))
	if err := b.Sweep(t.Context()); err == nil {
		t.Error("Sweep succeeded without a list")
	}
	b.mustAgree(t, "c1")
}

func TestSweepReleasesWhatLostItsLink(t *testing.T) {
	for name, ahead := range map[string]time.Duration{"": 0, "recorded by a clock that was ahead": time.Hour} {
		t.Run(name, func(t *testing.T) { sweepLost(t, time.Now().Add(time.Second-ahead)) })
	}
}

func sweepLost(t *testing.T, now time.Time) {
	t.Helper()
	b := newBench(t)
	if _, err := b.Add(t.Context(), request("c1")); err != nil {
		t.Fatal(err)
	}
	b.net.mu.Lock()
	clear(b.net.pods)
	b.net.mu.Unlock()
	isLost := func(store.Allocation) bool { return true }
	for _, at := range []time.Time{now, now.Add(suspicion)} {
		if err := b.releaseLost(t.Context(), &b.unlinked, at, isLost); err != nil {
			t.Fatal(err)
		}
	}
	b.mustAgree(t)
	testkit.Eventually(t, time.Second, "the address cools", func() error {
		us, err := b.store.Usage(t.Context())
		if err == nil && us[0].Cooling != 1 {
			err = fmt.Errorf("%d cooling", us[0].Cooling)
		}
		return err
	})
}

// A pod's link goes before its DEL comes, as when it ends by itself.
func TestSuspicionEndsWithTheAttachment(t *testing.T) {
	b := newBench(t)
	r := request("c1")
	if _, err := b.Add(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	b.net.mu.Lock()
	clear(b.net.pods)
	b.net.mu.Unlock()
	suspected := func() int {
		t.Helper()
		if err := b.Sweep(t.Context()); err != nil {
			t.Fatal(err)
		}
		return len(b.unlinked.Copy())
	}
	if n := suspected(); n != 1 {
		t.Errorf("%d attachments are suspected, want the one without a link", n)
	}
	if err := b.Del(t.Context(), r.ID); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, time.Second, "nothing is suspected any more", func() error {
		if n := suspected(); n > 0 {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
}

// A pod deletes its own link: it keeps its address, which is its status.podIP, until its network
// namespace goes.
func TestSweepKeepsTheAddressOfALivingSandbox(t *testing.T) {
	b := newBench(t)
	r := request("c1")
	alloc, err := b.Add(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	b.lives[r.ID] = true
	b.net.mu.Lock()
	clear(b.net.pods)
	b.net.mu.Unlock()
	now := time.Now().Add(time.Second)
	sweep := func(after time.Duration) {
		t.Helper()
		if err := b.releaseLost(t.Context(), &b.unlinked, now.Add(after), func(store.Allocation) bool { return true }); err != nil {
			t.Fatal(err)
		}
	}
	for i := range time.Duration(4) {
		sweep(i * suspicion)
		b.mustState(t, "c1", store.Attached)
		if b.Linkless(alloc) != (i > 0) {
			t.Errorf("look %d: linkless is %t", i, b.Linkless(alloc))
		}
	}
	// Nobody answers for an address that no route leads to.
	if want := []string{"changed default-0", "changed default-0"}; !slices.Equal(b.links.told, want) {
		t.Errorf("told are %q, want %q: when it was attached, and when it lost its link", b.links.told, want)
	}
	if len(b.warnings) != 1 || !strings.HasPrefix(b.warnings[0], "PodLinkMissing: ") || !strings.Contains(b.warnings[0], alloc.Address.String()) {
		t.Errorf("warnings: %q, want one with the address", b.warnings)
	}
	rewired := alloc
	rewired.HostIfIndex++
	if b.Linkless(rewired) {
		t.Error("linkless with a new link")
	}
	b.lives[r.ID] = false
	sweep(5 * suspicion)
	b.mustAgree(t)
	testkit.Eventually(t, time.Second, "the address cools, and nothing is remembered", func() error {
		us, err := b.store.Usage(t.Context())
		if err == nil && us[0].Cooling != 1 {
			err = fmt.Errorf("%d cooling", us[0].Cooling)
		}
		return err
	})
	sweep(6 * suspicion)
	if n := len(b.linkless.Copy()); n > 0 {
		t.Errorf("%d attachments are remembered", n)
	}
}

// A sandbox that the runtime says it doesn't have any more is released, whatever is left of it.
func TestGCReleasesASandboxThatLives(t *testing.T) {
	b := newBench(t)
	r := request("c1")
	if _, err := b.Add(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	b.lives[r.ID] = true
	for _, after := range []time.Duration{time.Second, time.Second + suspicion} {
		if err := b.GC(t.Context(), nil, time.Now().Add(after)); err != nil {
			t.Fatal(err)
		}
	}
	b.mustAgree(t)
}
