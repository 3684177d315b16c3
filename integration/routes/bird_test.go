package routes

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/pkg/testkit"
)

// bird is a BIRD in a network namespace.
type bird struct {
	rig.Program
	netns func() string // its path, which is another one after a boot
	dir   string
	text  string
}

// newBIRD prepares one with a configuration.
func newBIRD(dir string, netns func() string, text string) *bird {
	b := &bird{netns: netns, dir: dir, text: text}
	b.Log = filepath.Join(b.dir, "log")
	return b
}

func (b *bird) path(name string) string { return filepath.Join(b.dir, name) }

// start starts it and waits until it answers.
func (b *bird) start(ctx context.Context) error {
	if err := os.MkdirAll(b.dir, 0o700); err != nil {
		return err
	}
	if err := os.WriteFile(b.path("bird.conf"), []byte(b.text), 0o600); err != nil {
		return err
	}
	b.Path, b.Netns = "bird", b.netns()
	b.Args = []string{"-d", "-c", b.path("bird.conf"), "-s", b.path("ctl"), "-P", b.path("pid")}
	if err := b.Start(); err != nil {
		return err
	}
	return b.ready(ctx)
}

func (b *bird) ready(ctx context.Context) error {
	return testkit.Within(ctx, 10*time.Second, func() error {
		if !b.Running() {
			return fmt.Errorf("BIRD has ended:\n%s", b.Logs(20))
		}
		_, err := b.ask("show status")
		return err
	})
}

// kill ends it without a farewell to its peers.
func (b *bird) kill() { b.Kill() }

func (b *bird) logs(n int) string { return b.Logs(n) }

// reply is a line of an answer: the code of its kind, which is left out when it is
// that of the line before, and whether it is the last one.
var reply = regexp.MustCompile(`^(?:(\d{4})([ -])| |\+)`)

// ask gives a command, as birdc does, and returns what birdc would print.
func (b *bird) ask(command string) (string, error) {
	conn, err := net.Dial("unix", b.path("ctl"))
	if err != nil {
		return "", err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(testkit.Timeout(5 * time.Second))); err != nil {
		return "", err
	}
	if _, err := fmt.Fprintln(conn, command); err != nil {
		return "", err
	}
	var text strings.Builder
	lines := bufio.NewScanner(conn)
	for ends := 0; ends < 2; { // the first one is that of the welcome
		if !lines.Scan() {
			return "", fmt.Errorf("%s: the answer has no end: %w", command, lines.Err())
		}
		m := reply.FindStringSubmatch(lines.Text())
		if m == nil {
			return "", fmt.Errorf("%s: unexpected answer %q", command, lines.Text())
		}
		if m[1] >= "8000" {
			return "", fmt.Errorf("%s: %s", command, lines.Text())
		}
		if m[2] == " " {
			ends++
		}
		if ends > 0 {
			text.WriteString(lines.Text()[len(m[0]):] + "\n")
		}
	}
	return text.String(), nil
}

// announcement is a route: its prefix, and the protocol that it came by.
type announcement struct {
	prefix netip.Prefix
	origin string
}

// routeLine is the first line of a route; the prefix is left out when the route before
// has the same.
var routeLine = regexp.MustCompile(`^(\S+)?\s+[a-z]+ \[(\S+) `)

// parseRoutes reads what "show route all" prints.
func parseRoutes(text string) ([]announcement, error) {
	var all []announcement
	var prefix netip.Prefix
	for line := range strings.Lines(text) {
		m := routeLine.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		if m[1] != "" {
			var err error
			if prefix, err = netip.ParsePrefix(m[1]); err != nil {
				return nil, fmt.Errorf("%q: %w", line, err)
			}
		}
		if !prefix.IsValid() {
			return nil, fmt.Errorf("%q is of no prefix", line)
		}
		all = append(all, announcement{prefix, m[2]})
	}
	return all, nil
}

// routes returns the routes of BIRD's own tables master4 and master6, or of the one
// that is named.
func (b *bird) routes(tables ...string) ([]announcement, error) {
	if len(tables) == 0 {
		tables = []string{"master4", "master6"}
	}
	var all []announcement
	for _, table := range tables {
		text, err := b.ask("show route all table " + table)
		if err != nil {
			return nil, err
		}
		some, err := parseRoutes(text)
		if err != nil {
			return nil, err
		}
		all = append(all, some...)
	}
	return all, nil
}

// announced returns which node announces what to this router, whose protocols are
// named <node>_<family>.
func (b *bird) announced() ([]announcement, error) {
	all, err := b.routes()
	for i := range all {
		all[i].origin, _, _ = strings.Cut(all[i].origin, "_")
	}
	return all, err
}

// routerAS is that of the router, and of nodes that peer by iBGP.
const routerAS = 65000

// routerConf is a router's configuration: a session with each node in each of its
// families, which reflects what others announce.
func routerConf(nodes []*node) string {
	var c strings.Builder
	c.WriteString(`router id 10.255.0.1;
protocol device { }
protocol bfd { interface "*" { interval 300 ms; multiplier 5; }; }
protocol kernel { ipv4 { import none; export where source = RTS_BGP; }; }
protocol kernel { ipv6 { import none; export where source = RTS_BGP; }; }
template bgp node {
  direct;
  hold time 9;
  med metric on;
  connect delay time 1;
  connect retry time 1;
  error wait time 1, 2;
}
`)
	for _, n := range nodes {
		for _, s := range []struct {
			family rig.Family
			peer   netip.Addr
		}{{rig.IPv4, n.Addr4}, {rig.IPv6, n.Addr6}} {
			if !s.peer.IsValid() {
				continue
			}
			more := ""
			if n.as == routerAS {
				more = "rr client; "
			}
			if n.bfd {
				more += "bfd on; "
			}
			fmt.Fprintf(&c, `protocol bgp %s_%d from node {
  local as %d;
  neighbor %s as %d;
  %sipv%[2]d { import all; export where source = RTS_BGP; next hop self; };
}
`, n.speaker(), s.family, routerAS, s.peer, n.as, more)
		}
	}
	return c.String()
}
