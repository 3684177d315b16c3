package announce

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/coil-net/coil/pkg/kernel/announce"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/kernel/sysctl"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

const proto = 30

var (
	v4, v6  = netip.MustParseAddr("192.0.2.200"), netip.MustParseAddr("2001:db8::200")
	podHas  = of("lan:192.0.2.200", "lan:2001:db8::200")
	onEth0  = []string{"192.0.2.200 eth0", "2001:db8::200 eth0"}
	noEntry = []string(nil)
)

// site is a host on the link eth0 of a node that answers for addresses.
type site struct {
	*Keeper
	host, node *netnstest.NS
	repairs    repairs
	warned     []string

	mu   sync.Mutex
	has  []Address
	fail error // of what reads has
	sent []string
	// failSend is the error of the next announcements.
	failSend error
	rivals   []Rival
}

// repairs notes what is counted.
type repairs struct {
	done map[string]int
	saw  []string
}

func (r *repairs) Done(_ context.Context, kind string, n int) {
	if n > 0 {
		r.done[kind] += n
	}
}

func (r *repairs) Saw(kind, _ string) { r.saw = append(r.saw, kind) }

func newSite(t *testing.T) *site {
	t.Helper()
	s := &site{host: netnstest.New(t), node: netnstest.New(t), repairs: repairs{done: map[string]int{}}}
	s.node.Configure(t, "link add eth0 type veth peer name eth0 netns "+s.host.Path,
		"link set eth0 up", "addr add 192.0.2.2/24 dev eth0", "addr add 2001:db8::2/64 dev eth0 nodad")
	s.host.Configure(t, "link set eth0 up")
	s.restart(t)
	return s
}

// restart is the end of coild and its start.
func (s *site) restart(t *testing.T) {
	t.Helper()
	h := testkit.Must(rtnl.New(s.node.NS))(t)
	t.Cleanup(h.Close)
	s.Keeper = New(Config{
		Addresses: func(context.Context) ([]Address, error) {
			s.mu.Lock()
			defer s.mu.Unlock()
			return slices.Clone(s.has), s.fail
		},
		Handle: h, Protocol: proto, Repairs: &s.repairs,
		Set: func(all ...sysctl.Setting) (bool, error) { return sysctl.Set(s.node.NS, all...) },
		Send: func(all []announce.Announcement) error {
			for _, a := range all {
				if a.MAC.String() != s.mac(t, a.Link) {
					t.Errorf("announced at %s", a.MAC)
				}
				s.sent = append(s.sent, a.Addr.String())
			}
			return s.failSend
		},
		Warn: func(reason, format string, args ...any) {
			s.warned = append(s.warned, reason+": "+fmt.Sprintf(format, args...))
		},
		Watch: func(ctx context.Context, link int, seen func(announce.Claim)) error {
			return announce.Watch(ctx, s.node.NS, link, seen)
		},
		Rival: func(r Rival) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.rivals = append(s.rivals, r)
		},
	})
}

// mac is the address of a link of the node.
func (s *site) mac(t *testing.T, index int) string {
	t.Helper()
	for l := range strings.Lines(s.node.IP(t, "-o", "link")) {
		if f := strings.Fields(l); f[0] == fmt.Sprintf("%d:", index) {
			return f[slices.Index(f, "link/ether")+1]
		}
	}
	return ""
}

// sync makes the entries of addresses, and returns what was announced at once.
func (s *site) sync(t *testing.T, has ...Address) []string {
	t.Helper()
	s.mu.Lock()
	s.has = has
	s.mu.Unlock()
	s.sent = nil
	if err := s.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s.sent
}

// entries are those of the node, "address link".
func (s *site) entries(t *testing.T) []string {
	t.Helper()
	var all []string
	for _, family := range []string{"-4", "-6"} {
		for l := range strings.Lines(s.node.IP(t, family, "neigh", "show", "proxy")) {
			f := strings.Fields(l)
			all = append(all, f[0]+" "+f[2])
		}
	}
	slices.Sort(all)
	return all
}

func (s *site) mustHave(t *testing.T, want []string) {
	t.Helper()
	if got := s.entries(t); !slices.Equal(got, want) {
		t.Errorf("entries are %q, want %q", got, want)
	}
}

func (s *site) mustCount(t *testing.T, answered, homeless int) {
	t.Helper()
	for _, f := range families {
		if a, h := testutil.ToFloat64(s.answered.WithLabelValues(f.String())), testutil.ToFloat64(s.homeless.WithLabelValues(f.String())); int(a) != answered || int(h) != homeless {
			t.Errorf("of %s, metrics are %v and %v, want %d and %d", f, a, h, answered, homeless)
		}
	}
}

// What is wanted is there, is announced when it is new, and has the parameters that it needs; what isn't wanted goes. Nothing is done
// twice.
func TestSync(t *testing.T) {
	s := newSite(t)
	s.node.IP(t, "neigh", "add", "proxy", "192.0.2.99", "dev", "eth0", "protocol", "30") // of an earlier time
	s.node.IP(t, "neigh", "add", "proxy", "192.0.2.98", "dev", "eth0")                   // somebody's
	if got := s.sync(t, podHas...); !slices.Equal(got, []string{"192.0.2.200", "2001:db8::200"}) {
		t.Errorf("announced are %q", got)
	}
	s.mustHave(t, append([]string{"192.0.2.200 eth0", "192.0.2.98 eth0"}, onEth0[1]))
	s.mustCount(t, 1, 0)
	for key, want := range map[string]string{
		"net/ipv6/conf/all/proxy_ndp": "1", "net/ipv4/neigh/eth0/proxy_delay": "0", "net/ipv6/neigh/eth0/proxy_delay": "0",
		"net/ipv4/conf/eth0/proxy_arp": "0",
	} {
		if got, err := sysctl.Get(s.node.NS, key); err != nil || got != want {
			t.Errorf("%s is %s, %v; want %s", key, got, err, want)
		}
	}
	if got := s.sync(t, podHas...); got != nil {
		t.Errorf("announced again: %q", got)
	}
	if got := s.sync(t, of("lan:192.0.2.200", "lan:192.0.2.201")...); !slices.Equal(got, []string{"192.0.2.201"}) {
		t.Errorf("announced are %q", got)
	}
	if got := s.sync(t); got != nil || s.idle.Load() == false {
		t.Errorf("announced are %q though nothing is wanted", got)
	}
	s.mustHave(t, []string{"192.0.2.98 eth0"})
	s.mustCount(t, 0, 0)
	if len(s.repairs.done) > 0 || len(s.warned) > 0 {
		t.Errorf("repairs %v, warnings %q", s.repairs.done, s.warned)
	}
}

// A node without such addresses does nothing: no parameter changes, and nothing waits.
func TestIdle(t *testing.T) {
	s := newSite(t)
	s.sync(t)
	if got, err := sysctl.Get(s.node.NS, "net/ipv6/conf/all/proxy_ndp"); err != nil || got != "0" {
		t.Errorf("proxy_ndp is %s, %v", got, err)
	}
	s.Keeper.mu.Lock() // as if something hung
	defer s.Keeper.mu.Unlock()
	if err := s.Withdraw(t.Context(), v4); err != nil {
		t.Error(err)
	}
	if lost, err := s.Check(t.Context()); lost || err != nil {
		t.Errorf("lost %t, %v", lost, err)
	}
	if s.Lost(t.Context(), []rtnl.Change{{Kind: rtnl.Unknown}}) {
		t.Error("changes matter")
	}
}

// A new process finds the entries and leaves them as they are; what was lost before counts. It announces each once.
func TestRestart(t *testing.T) {
	s := newSite(t)
	s.sync(t, podHas...)
	s.restart(t)
	s.node.IP(t, "neigh", "del", "proxy", v4.String(), "dev", "eth0")
	s.node.IP(t, "neigh", "add", "proxy", "192.0.2.201", "dev", "eth0", "protocol", "30") // of a pod that ended meanwhile
	if got := s.sync(t, podHas...); !slices.Equal(got, []string{"2001:db8::200", "192.0.2.200"}) {
		t.Errorf("announced are %q", got)
	}
	s.mustHave(t, onEth0)
	if n := len(s.turns); n != 1 || len(s.turns[0].spots) != 1 {
		t.Errorf("%v is announced later, want the lost one", s.turns)
	}
}

// An address is withdrawn before others get it, also when the process has just begun, and while a Sync is at work that still saw it.
func TestWithdraw(t *testing.T) {
	s := newSite(t)
	s.sync(t, podHas...)
	testkit.Check(t, s.Withdraw(t.Context(), v4, netip.MustParseAddr("192.0.2.77")))
	s.mustHave(t, onEth0[1:])
	testkit.Check(t, s.Withdraw(t.Context(), netip.MustParseAddr("192.0.2.77")))
	s.restart(t)
	testkit.Check(t, s.Withdraw(t.Context(), v6))
	s.mustHave(t, noEntry)

	seen, proceed := make(chan struct{}), make(chan struct{})
	s.cfg.Addresses = func(context.Context) ([]Address, error) {
		close(seen)
		<-proceed
		return podHas, nil
	}
	synced := make(chan error, 1)
	go func() { synced <- s.Sync(t.Context()) }()
	<-seen
	withdrawn := make(chan error, 1)
	go func() { withdrawn <- s.Withdraw(t.Context(), v4, v6) }()
	close(proceed)
	testkit.Check(t, <-synced, <-withdrawn)
	s.mustHave(t, noEntry)
}

// Announcements of an address end with it.
func TestWithdrawnIsNotAnnounced(t *testing.T) {
	s := newSite(t)
	s.sync(t, podHas...)
	testkit.Check(t, s.Withdraw(t.Context(), v4))
	s.sent = nil
	s.send(t.Context(), s.turns.due(s.turns.next()))
	if !slices.Equal(s.sent, []string{v6.String()}) {
		t.Errorf("announced are %q", s.sent)
	}
}

// Run repeats announcements. One that fails is repeated all the same.
func TestRun(t *testing.T) {
	s := newSite(t)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	s.Keeper.mu.Lock()
	s.failSend = errors.New("no buffer space")
	s.Keeper.mu.Unlock()
	s.sync(t, podHas...)
	testkit.Eventually(t, 10*time.Second, "announced again", func() error {
		s.Keeper.mu.Lock()
		defer s.Keeper.mu.Unlock()
		if len(s.sent) < 6 {
			return fmt.Errorf("%q", s.sent)
		}
		return nil
	})
	cancel()
	testkit.Check(t, <-ended)
}

// Entries that others delete, or that go with a link that goes down, come back, are counted and announced.
func TestRepair(t *testing.T) {
	s := newSite(t)
	s.sync(t, podHas...)
	if lost, err := s.Check(t.Context()); lost || err != nil {
		t.Errorf("lost %t, %v", lost, err)
	}
	s.node.IP(t, "neigh", "del", "proxy", v6.String(), "dev", "eth0")
	if lost, err := s.Check(t.Context()); !lost || err != nil || !slices.Equal(s.repairs.saw, []string{Entry}) {
		t.Errorf("lost %t, %v, saw %q", lost, err, s.repairs.saw)
	}
	if got := s.sync(t, podHas...); !slices.Equal(got, []string{v6.String()}) || s.repairs.done[Entry] != 1 {
		t.Errorf("announced are %q, repairs are %v", got, s.repairs.done)
	}
	testkit.Check(t, s.node.Lab().Sysctl("ipv6/conf/all/proxy_ndp=0", "ipv4/neigh/eth0/proxy_delay=80"))
	s.sync(t, podHas...)
	if s.repairs.done[Parameter] != 2 {
		t.Errorf("repairs are %v", s.repairs.done)
	}
	s.node.Configure(t, "link set eth0 down", "link set eth0 up", "addr add 2001:db8::2/64 dev eth0 nodad")
	s.mustHave(t, noEntry)
	if got := s.sync(t, podHas...); len(got) != 2 || s.repairs.done[Entry] != 3 {
		t.Errorf("announced are %q, repairs are %v", got, s.repairs.done)
	}
	s.mustHave(t, onEth0)
}

// Addresses follow the links: to one that gets an address of their subnet, and away from one that has none any more. Each change is
// noticed. Who has no link is told, once for each pool, and again after it had one.
func TestLinks(t *testing.T) {
	s := newSite(t)
	ctx, cancel := context.WithCancel(t.Context())
	changes := testkit.Must(s.cfg.Handle.Subscribe(rtnl.Interest{Links: true}))(t)
	told := make(chan []rtnl.Change, 100)
	ended := make(chan error, 1)
	go func() {
		ended <- changes.Run(ctx, time.Millisecond, func(all []rtnl.Change) { told <- all })
	}()
	defer func() {
		cancel()
		testkit.Check(t, <-ended, changes.Close())
	}()
	noticed := func(commands ...string) {
		t.Helper()
		s.node.Configure(t, commands...)
		for {
			select {
			case all := <-told:
				if s.Lost(t.Context(), all) {
					return
				}
			case <-time.After(testkit.Timeout(5 * time.Second)):
				t.Fatalf("%q isn't noticed", commands)
			}
		}
	}
	other := of("dmz:198.51.100.7", "dmz:198.51.100.8", "dmz:2001:db8:1::7", "lan:192.0.2.200", "lan:2001:db8::200")
	s.sync(t, other...)
	s.sync(t, other...)
	s.mustHave(t, onEth0)
	if len(s.warned) != 1 || !strings.Contains(s.warned[0], "NoLinkForAddress: AddressPool dmz") || !strings.Contains(s.warned[0], "198.51.100.7") || !strings.Contains(s.warned[0], "spec.announce") {
		t.Errorf("warnings are %q", s.warned)
	}
	if n := testutil.ToFloat64(s.homeless.WithLabelValues("IPv4")); n != 2 {
		t.Errorf("%v addresses of IPv4 are counted without a link", n)
	}
	noticed("link add up1 type veth peer name up1 netns "+s.host.Path, "link set up1 up")
	noticed("addr add 198.51.100.1/24 dev up1", "addr add 2001:db8:1::1/64 dev up1 nodad")
	if got := s.sync(t, other...); len(got) != 3 {
		t.Errorf("announced are %q", got)
	}
	s.mustHave(t, []string{"192.0.2.200 eth0", "198.51.100.7 up1", "198.51.100.8 up1", "2001:db8:1::7 up1", "2001:db8::200 eth0"})
	noticed("link set up1 down")
	s.sync(t, other...)
	s.mustHave(t, onEth0)
	if len(s.warned) != 2 || !strings.Contains(s.warned[1], "dmz") {
		t.Errorf("warnings are %q", s.warned)
	}
	noticed("link set up1 up", "addr add 2001:db8:1::1/64 dev up1 nodad")
	s.sync(t, other...)
	noticed("link del up1")
	noticed("addr del 192.0.2.2/24 dev eth0")
	s.sync(t, other...)
	s.mustHave(t, onEth0[1:])
	if s.repairs.done[Entry] > 0 {
		t.Errorf("repairs are %v, though nobody deleted an entry", s.repairs.done)
	}
}

// A link with another MAC address is told to all.
func TestMACChanges(t *testing.T) {
	s := newSite(t)
	s.sync(t, podHas...)
	s.node.IP(t, "link", "set", "eth0", "address", "02:00:5e:00:53:01")
	if got := s.sync(t, podHas...); len(got) != 2 || len(s.turns) != 2 {
		t.Errorf("announced are %q", got)
	}
}

// Who couldn't hear while a link had no carrier is told when it has, and the entries stay meanwhile.
func TestCarrier(t *testing.T) {
	s := newSite(t)
	carrier := func(want bool) {
		t.Helper()
		testkit.Eventually(t, 5*time.Second, fmt.Sprintf("carrier %t", want), func() error {
			if text := s.node.IP(t, "-o", "link", "show", "eth0"); strings.Contains(text, "LOWER_UP") != want {
				return errors.New(text)
			}
			return nil
		})
	}
	s.sync(t, podHas...)
	for range 2 {
		s.host.IP(t, "link", "set", "eth0", "down")
		carrier(false)
		if got := s.sync(t, podHas...); got != nil {
			t.Errorf("without carrier announced are %q", got)
		}
		s.mustHave(t, onEth0)
		s.host.IP(t, "link", "set", "eth0", "up")
		carrier(true)
		if got := s.sync(t, podHas...); len(got) != 2 {
			t.Errorf("announced are %q", got)
		}
	}
	if s.repairs.done[Entry] > 0 {
		t.Errorf("repairs are %v", s.repairs.done)
	}
}

// Nothing is changed when it can't be read what is wanted. What is uncertain stays as it is.
func TestUncertain(t *testing.T) {
	s := newSite(t)
	s.sync(t, podHas...)
	s.fail = errors.New("disk I/O error")
	if err := s.Sync(t.Context()); err == nil || !strings.Contains(err.Error(), "disk I/O error") {
		t.Errorf("error is %v", err)
	}
	s.fail = nil
	s.mustHave(t, onEth0)
	s.restart(t)
	s.sync(t, of("lan:192.0.2.200?", "lan:2001:db8::200?", "lan:192.0.2.201?")...)
	s.mustHave(t, onEth0)
	s.mustCount(t, 1, 0)
	testkit.Check(t, s.Withdraw(t.Context(), v4, v6))
	s.sync(t, of("lan:192.0.2.200?", "lan:2001:db8::200?")...)
	s.mustHave(t, noEntry)
}
