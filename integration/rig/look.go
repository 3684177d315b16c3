package rig

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// row is an address in the record.
type row struct {
	ContainerID string  `json:"container_id"`
	IfName      string  `json:"ifname"`
	State       string  `json:"state"`
	IPv4        *string `json:"ipv4"`
	IPv6        *string `json:"ipv6"`
	Pool        string  `json:"pool"`
	Block       string  `json:"block"`
	HostIfName  string  `json:"host_ifname"`
	HostIfIndex int     `json:"host_ifindex"`
	NetnsInode  uint64  `json:"netns_inode"`
}

func (r row) id() string { return r.ContainerID + "/" + r.IfName }

func (r row) addrs() string { return joinText(r.IPv4, r.IPv6) }

func joinText(texts ...*string) string {
	var all []string
	for _, t := range texts {
		if t != nil {
			all = append(all, *t)
		}
	}
	return strings.Join(all, ",")
}

// link is a link as iproute2 shows it.
type link struct {
	Index    int      `json:"ifindex"`
	Name     string   `json:"ifname"`
	Alias    string   `json:"ifalias"`
	Group    string   `json:"group"`
	State    string   `json:"operstate"`
	AltNames []string `json:"altnames"`
}

// iproute is a route as iproute2 shows it.
type iproute struct {
	Dst      string `json:"dst"`
	Dev      string `json:"dev"`
	Protocol string `json:"protocol"`
	Type     string `json:"type"`
}

// state is what the three sources say about a node.
type state struct {
	rows     []row
	blocks   map[string]string // of the record: name to ranges
	links    []link
	routes   map[string][]iproute // by table
	rules    []string
	proxies  []string // addresses for which the node answers, of coild's protocol
	held     []v2.AddressBlock
	requests []v2.BlockRequest
	queued   []string
}

// look reads what the three sources say.
func (n *Node) look(ctx context.Context) (s state, err error) {
	if err := n.readRecord(ctx, &s); err != nil {
		return s, err
	}
	if err := n.readKernel(ctx, &s); err != nil {
		return s, err
	}
	o := metav1.ListOptions{LabelSelector: v2.LabelNode + "=" + n.Name}
	blocks, err := n.rig.Coil.CoilV2().AddressBlocks().List(ctx, o)
	if err != nil {
		return s, err
	}
	requests, err := n.rig.Coil.CoilV2().BlockRequests().List(ctx, o)
	if err != nil {
		return s, err
	}
	s.held, s.requests = blocks.Items, requests.Items
	queued, err := os.ReadDir(n.DelQueueDir())
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return s, err
	}
	for _, q := range queued {
		s.queued = append(s.queued, q.Name())
	}
	return s, nil
}

// readRecord reads the database by another program, as people do.
func (n *Node) readRecord(ctx context.Context, s *state) error {
	if err := n.query(ctx, `SELECT * FROM addresses`, &s.rows); err != nil {
		return err
	}
	var blocks []struct {
		Name       string
		IPv4, IPv6 *string
	}
	if err := n.query(ctx, `SELECT name, ipv4, ipv6 FROM blocks`, &blocks); err != nil {
		return err
	}
	s.blocks = map[string]string{}
	for _, b := range blocks {
		s.blocks[b.Name] = joinText(b.IPv4, b.IPv6)
	}
	var bad []json.RawMessage
	if err := n.query(ctx, `PRAGMA foreign_key_check`, &bad); err != nil || len(bad) > 0 {
		return errors.Join(err, fmt.Errorf("foreign keys that lead nowhere: %s", bad))
	}
	return nil
}

// query asks the database. A record that doesn't exist has no rows.
func (n *Node) query(ctx context.Context, sql string, rows any) error {
	cmd := exec.CommandContext(ctx, "sqlite3", "-readonly", "-json", "-cmd", ".timeout 5000", n.Database(), sql)
	out, err := cmd.Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return fmt.Errorf("sqlite3 %s: %w: %s", sql, err, exit.Stderr)
	}
	if err != nil || len(out) == 0 {
		return err
	}
	return json.Unmarshal(out, rows)
}

// readKernel reads links, routes and rules of the node.
func (n *Node) readKernel(ctx context.Context, s *state) error {
	s.routes = map[string][]iproute{}
	if n.ns == nil {
		return nil
	}
	if err := n.ip(ctx, &s.links, "-details", "link", "show", "type", "veth"); err != nil {
		return err
	}
	for _, table := range []string{podTable, exportTable, unassignedTable} {
		for _, family := range []string{"-4", "-6"} {
			var routes []iproute
			if err := n.ip(ctx, &routes, "-N", "-details", family, "route", "show", "table", table); err != nil {
				return err
			}
			for _, r := range routes {
				// -N makes numbers of these names, too (linux/rtnetlink.h, RTN_*).
				if name, ok := map[string]string{"1": "unicast", "7": "unreachable"}[r.Type]; ok {
					r.Type = name
				}
				s.routes[table] = append(s.routes[table], r)
			}
		}
	}
	for _, family := range []string{"-4", "-6"} {
		out, err := n.Run(ctx, "ip", "-N", "-details", family, "rule", "show")
		if err != nil {
			return err
		}
		for line := range strings.Lines(out) {
			s.rules = append(s.rules, strings.Join(strings.Fields(line), " "))
		}
	}
	for _, family := range []string{"-4", "-6"} {
		out, err := n.Run(ctx, "ip", "-N", family, "neigh", "show", "proxy")
		if err != nil {
			return err
		}
		for line := range strings.Lines(out) {
			if strings.Contains(line, " proto "+protocol) {
				s.proxies = append(s.proxies, strings.Fields(line)[0])
			}
		}
	}
	return nil
}

// ip asks iproute2. A table that was never used is an empty one.
func (n *Node) ip(ctx context.Context, to any, args ...string) error {
	out, err := n.ns.Run(ctx, "ip", append([]string{"-json"}, args...)...)
	if err != nil && strings.Contains(err.Error(), "FIB table does not exist") {
		return nil
	}
	if err != nil || strings.TrimSpace(out) == "" {
		return err
	}
	return json.Unmarshal([]byte(out), to)
}
