package natgateway

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/plan/gateway"
	"github.com/coil-net/coil/pkg/plan/ruleset"
)

// Counters has the counters of the filter; see package kernel/nft.
type Counters interface {
	Counters(ctx context.Context) ([]nft.Counter, error)
	// AtLimit are the clients that were refused a connection within a time.
	AtLimit(ctx context.Context, within time.Duration) ([]netip.Addr, error)
}

// Connections tells about the table of connections; see package kernel/conntrack.
type Connections interface {
	Size() (count, limit int, err error)
	Stats(ctx context.Context) (conntrack.Stats, error)
	Uses(ctx context.Context, n int, own ...netip.Addr) ([]conntrack.Use, error)
	Leaving(ctx context.Context, own ...netip.Addr) (map[netip.Addr]int, error)
}

const (
	// maxUses is how many destinations have a metric of their own.
	maxUses = 10
	// usesAge is for how long their figures are kept: they cost a look at each connection.
	usesAge = 30 * time.Second
	// limitedFor is for how long a client that was refused a connection is told of: longer than
	// the controller needs to ask twice.
	limitedFor = 2 * time.Minute
	// collectTimeout bounds the work for one scrape.
	collectTimeout = 8 * time.Second
)

// Collector makes metrics of the kernel's counters, when it is asked. A counter that can't be
// read has no metric, and is logged.
type Collector struct {
	ctx         context.Context
	router      []netip.Addr
	own         func() []netip.Addr
	filter      Counters
	connections Connections

	entries, limit              *prometheus.Desc
	insertFailed, full, evicted *prometheus.Desc
	counted                     map[string][2]*prometheus.Desc // packets and bytes
	dropped                     [2]*prometheus.Desc
	ports, leaving              *prometheus.Desc

	mu   sync.Mutex
	uses []conntrack.Use
	read time.Time
	// byAddress has the connections of floating addresses, as they were read at byAddressRead.
	byAddress     map[netip.Addr]int
	byAddressRead time.Time
}

// NewCollector returns a collector for the router of cfg; ctx has the logger, and ends scrapes
// in progress. Connections of clients leave by the addresses own.
func NewCollector(ctx context.Context, cfg Config, own func() []netip.Addr, filter Counters, connections Connections) *Collector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("coil_egress_"+name, help, labels, routerLabels(cfg))
	}
	both := func(name, what string, labels ...string) [2]*prometheus.Desc {
		return [2]*prometheus.Desc{
			desc(name+"_packets_total", "Packets "+what+".", labels...), desc(name+"_bytes_total", "Bytes of packets "+what+".", labels...),
		}
	}
	return &Collector{
		ctx: ctx, router: cfg.Addresses, own: own, filter: filter, connections: connections,
		entries:      desc("nf_conntrack_entries_count", "Connections that the router tracks."),
		limit:        desc("nf_conntrack_entries_limit", "Connections that the router can track."),
		insertFailed: desc("nf_conntrack_insert_failed_total", "Packets dropped because their connection had the addresses and ports of another one."),
		full:         desc("nf_conntrack_dropped_total", "Packets dropped because no more connections can be tracked."),
		evicted:      desc("nf_conntrack_early_drop_total", "Connections without an answer that were forgotten to make room."),
		counted: map[string][2]*prometheus.Desc{
			ruleset.Masqueraded: both("nftables_masqueraded", "of clients that left with the router's address", "protocol"),
			ruleset.Invalid:     both("nftables_invalid", "dropped because they belong to no connection", "protocol"),
		},
		dropped: both("nftables_dropped", "dropped, by the reason", "protocol", "reason"),
		ports: desc("snat_ports_used", "Ports of an address of the router in use towards one destination, of 64512; of the ten destinations with the most, at most 30 s old.",
			"protocol", "destination", "port"),
		leaving: desc("address_connections", "Connections of clients that leave by a floating address, at most 30 s old; of addresses that have some.", "address"),
	}
}

// Describe implements prometheus.Collector.
func (c *Collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.entries, c.limit, c.insertFailed, c.full, c.evicted, c.ports, c.leaving, c.dropped[0], c.dropped[1]} {
		ch <- d
	}
	for _, d := range c.counted {
		ch <- d[0]
		ch <- d[1]
	}
}

// Collect implements prometheus.Collector.
func (c *Collector) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(c.ctx, collectTimeout)
	defer cancel()
	logger := klog.FromContext(ctx)
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	counter := func(d *prometheus.Desc, v uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	if count, limit, err := c.connections.Size(); err != nil {
		logger.Error(err, "No metrics of the number of connections")
	} else {
		gauge(c.entries, float64(count))
		gauge(c.limit, float64(limit))
	}
	if s, err := c.connections.Stats(ctx); err != nil {
		logger.Error(err, "No metrics of failed connections")
	} else {
		counter(c.insertFailed, s.InsertFailed)
		counter(c.full, s.Dropped)
		counter(c.evicted, s.EarlyDropped)
	}
	counters, err := c.filter.Counters(ctx)
	if err != nil {
		logger.Error(err, "No metrics of nftables")
	}
	for _, n := range counters {
		name, family := dataplane.CutFamily(n.Name)
		d, labels := c.dropped, []string{protocol(family), name}
		if own, ok := c.counted[name]; ok {
			d, labels = own, labels[:1]
		}
		counter(d[0], n.Packets, labels...)
		counter(d[1], n.Bytes, labels...)
	}
	uses, err := c.use(ctx)
	if err != nil {
		logger.Error(err, "No metrics of ports")
	}
	for _, u := range uses {
		gauge(c.ports, float64(u.Ports), protocolName(u.Protocol), u.Destination.Addr().String(), strconv.Itoa(int(u.Destination.Port())))
	}
	leaving, err := c.leavingBy(ctx)
	if err != nil {
		logger.Error(err, "No metrics of floating addresses")
	}
	for a, n := range leaving {
		gauge(c.leaving, float64(n), a.String())
	}
}

// Pressure returns how many of its connections and ports the router uses; of ports, at most 30 s ago.
func (c *Collector) Pressure(ctx context.Context) (gateway.Pressure, error) {
	count, limit, err := c.connections.Size()
	if err != nil {
		return gateway.Pressure{}, err
	}
	p := gateway.Pressure{Connections: count, MaxConnections: limit, MaxPorts: gateway.SourcePorts}
	limited, limitErr := c.filter.AtLimit(ctx, limitedFor)
	if p.Limited = len(limited); p.Limited > 0 {
		p.Client = limited[0].String()
	}
	uses, err := c.use(ctx)
	if len(uses) > 0 {
		p.Ports = uses[0].Ports
		p.Destination = protocolName(uses[0].Protocol) + " " + uses[0].Destination.String()
	}
	return p, errors.Join(limitErr, err)
}

// ServeHTTP answers with the Pressure.
func (c *Collector) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), collectTimeout)
	defer cancel()
	p, err := c.Pressure(ctx)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(p); err != nil {
		klog.FromContext(c.ctx).V(2).Info("Can't answer how much is used", "reason", err)
	}
}

// use returns the destinations that most ports are used for, read now or a moment ago.
func (c *Collector) use(ctx context.Context) ([]conntrack.Use, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.read) < usesAge {
		return c.uses, nil
	}
	uses, err := c.connections.Uses(ctx, maxUses, c.own()...)
	if err == nil {
		c.uses, c.read = uses, time.Now()
	}
	return uses, err
}

// leavingBy counts the connections of each floating address, now or a moment ago. Without such addresses the table isn't read. Transit
// addresses aren't seen outside the node.
func (c *Collector) leavingBy(ctx context.Context) (map[netip.Addr]int, error) {
	floating := slices.DeleteFunc(slices.Clone(c.own()), func(a netip.Addr) bool {
		_, transit := dataplane.TransitNumber(a)
		return transit || slices.Contains(c.router, a)
	})
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(floating) == 0 {
		return nil, nil
	}
	if time.Since(c.byAddressRead) < usesAge {
		return c.byAddress, nil
	}
	all, err := c.connections.Leaving(ctx, floating...)
	if err == nil {
		c.byAddress, c.byAddressRead = all, time.Now()
	}
	return all, err
}

// protocolNames are the usual names of protocols of IP.
var protocolNames = map[byte]string{unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp", unix.IPPROTO_SCTP: "sctp"}

func protocolName(number byte) string {
	return cmp.Or(protocolNames[number], strconv.Itoa(int(number)))
}
