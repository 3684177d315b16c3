package rig_test

import (
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/integration/rig/rigtest"
	"github.com/coil-net/coil/pkg/testkit"
)

// A client keeps sending to a Service from one port while the pod behind it is replaced,
// and another pod gets the address of the old one. The packets that the client sends must follow the Service.
func TestOldFlowsNeverReachTheNextPod(t *testing.T) {
	r := rigtest.New(t)
	const service, single = "10.96.0.1", "10.3.0.0"
	testkit.Check(t, r.AddPool(t.Context(), "default", 2, rig.V4("10.1.0.0/24")),
		r.AddPool(t.Context(), "single", 0, rig.V4(single+"/32")), r.AddNamespace(t.Context(), "single", "single"))
	n := testkit.Must(r.AddNode(t.Context(), rig.NodeOptions{CoildFlags: []string{"--cool-down=1s"}}))(t)
	pod := func(namespace string) *rig.Sandbox {
		return testkit.Must(n.NewSandbox(t.Context(), rig.SandboxOptions{Namespace: namespace}))(t)
	}
	client, old, next, moved := pod(""), pod("single"), pod("single"), pod("")
	testkit.Must(client.Add(t.Context()))(t)
	if res := testkit.Must(old.Add(t.Context()))(t); res.Addrs[0].String() != single {
		t.Fatalf("the old pod has %v, want %s", res.Addrs, single)
	}
	to := testkit.Must(moved.Add(t.Context()))(t).Addrs[0].String()

	nft := func(format string, args ...any) string {
		t.Helper()
		return testkit.Must(n.Run(t.Context(), "nft", fmt.Sprintf(format, args...)))(t)
	}
	// As kube-proxy does it, and what passes is counted.
	nft(`add table ip t
		add chain ip t nat { type nat hook prerouting priority dstnat; }
		add rule ip t nat ip daddr %s dnat to %s
		add chain ip t seen { type filter hook forward priority filter; }
		add counter ip t old
		add counter ip t moved
		add rule ip t seen ip daddr %s udp dport 53 counter name old
		add rule ip t seen ip daddr %s udp dport 53 counter name moved`, service, single, single, to)
	counted := func(name string) int {
		t.Helper()
		out := nft("list counter ip t %s", name)
		var packets int
		if _, after, ok := strings.Cut(out, "packets "); !ok {
			t.Fatalf("counter %s: %s", name, out)
		} else if _, err := fmt.Sscan(after, &packets); err != nil {
			t.Fatal(err)
		}
		return packets
	}
	conn := testkit.Must(client.Dial(t.Context(), "udp", net.JoinHostPort(service, "53")))(t)
	defer conn.Close()
	send := func() {
		// A refusal of an earlier one is told by Write: no pod listens.
		for range 2 {
			if _, err := conn.Write([]byte("x")); err == nil {
				return
			}
		}
	}
	send()
	testkit.Eventually(t, 5*time.Second, "the old pod is reached", func() error {
		if c := counted("old"); c != 1 {
			return fmt.Errorf("%d packets", c)
		}
		return nil
	})

	nft("flush chain ip t nat; add rule ip t nat ip daddr %s dnat to %s", service, to)
	testkit.Check(t, old.Del(t.Context()))
	testkit.Eventually(t, 20*time.Second, "the next pod has the address", func() error {
		send() // which would keep an old flow alive
		_, err := next.Add(t.Context())
		return err
	})
	before := counted("old")
	for range 5 {
		send()
	}
	testkit.Eventually(t, 5*time.Second, "the packets have passed", func() error {
		if c := counted("moved"); c < 5 {
			return fmt.Errorf("%d packets went to the pod that has the Service now", c)
		}
		return nil
	})
	if c := counted("old"); c != before {
		t.Errorf("%d packets of the old flow reached the next pod", c-before)
	}
}
