package egress

import (
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// isFoU says whether a packet is of a tunnel.
func isFoU(p netlab.Packet) bool { return p.Protocol == unix.IPPROTO_UDP && p.DPort == 5555 }

// capture sees all packets of a port of the fabric. A packet that leaves by the port enters the namespace behind it.
type capture struct {
	*netlab.Capture
	t *testing.T
}

// newCapture begins to capture; it ends with the test.
func newCapture(t *testing.T, port string) *capture {
	t.Helper()
	c := testkit.Must(machine.Lab().NewCapture(port, everyPacket))(t)
	t.Cleanup(func() { _, _ = c.Close() })
	return &capture{c, t}
}

func everyPacket(netlab.Packet) bool { return true }

// forget forgets the packets so far.
func (c *capture) forget() { c.Take() }

// foreign are packets that left the router with a source that isn't its own.
func (c *capture) foreign() []netlab.Packet {
	return c.All(func(p netlab.Packet) bool {
		own := p.Src == router4 || p.Src == router6 || p.Src.IsLinkLocalUnicast() || p.Src.IsUnspecified()
		return !p.Out && !own
	})
}

// sound fails the test if a packet left the router with a wrong source.
func (c *capture) sound() {
	c.t.Helper()
	c.settle()
	if bad := c.foreign(); len(bad) > 0 {
		c.t.Errorf("%d packets left with a wrong source, the first %s", len(bad), bad[0])
	}
}

// settle waits until nothing arrives any more that was sent before.
func (c *capture) settle() {
	testkit.Eventually(c.t, 10*time.Second, "packets end", func() error {
		before := len(c.All(everyPacket))
		time.Sleep(30 * time.Millisecond)
		if after := len(c.All(everyPacket)); after != before {
			return fmt.Errorf("%d more packets", after-before)
		}
		return nil
	})
}
