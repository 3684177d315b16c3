// Command egress measures what a router of an Egress costs, in a virtual machine whose kernel
// has FoU: packets take turns between paths that Coil made, with either peering, and the same path
// made by hand with ip(8) and nft(8), which is the best that the kernel gives. And it measures how
// long new flows fail when a router vanishes that clients reach by a Service, or send to directly.
//
// It owns how that is compared and measured. The parts of an Egress come from Coil's own
// packages.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/pflag"

	"github.com/coil-net/coil/integration/bench/figures"
	"github.com/coil-net/coil/integration/lab/vm"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
)

// inside is the flag of the part that runs in the machine.
const inside = "inside"

type options struct {
	kernel   string
	parts    []string
	pairs    int
	seconds  int
	clients  []int
	rounds   int
	peerings []string
	out      string
	// inside is the part that is measured in the machine; the API server is the host's.
	inside  string
	apiDir  string
	apiPort uint16
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	var o options
	pflag.StringVar(&o.kernel, "kernel", "6.12", "series of the kernel")
	pflag.StringSliceVar(&o.parts, "parts", []string{partPaths, partFailover}, "what to measure")
	pflag.IntVar(&o.pairs, "pairs", 20, "how many times each path has its turn")
	pflag.IntVar(&o.seconds, "seconds", 2, "how long TCP sends at each turn")
	pflag.IntSliceVar(&o.clients, "clients", []int{1, 1000, 5000}, "how many clients a router has")
	pflag.IntVar(&o.rounds, "rounds", 3, "how many times a router loses its power")
	pflag.StringSliceVar(&o.peerings, "peerings", []string{string(v2.EgressPeeringService), string(v2.EgressPeeringDirect)},
		"spec.peering of the Egresses whose routers lose it; rounds of Direct alone take seconds")
	pflag.StringVar(&o.out, "out", "", "folder of the results; the default is integration/bench/out")
	pflag.StringVar(&o.inside, inside, "", "measure this part on the running kernel and print JSON")
	pflag.StringVar(&o.apiDir, "api-dir", "", "inside: directory of the API server")
	pflag.Uint16Var(&o.apiPort, "api-port", 0, "inside: its port at the host")
	pflag.Parse()
	if err := o.run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "egress:", err)
		os.Exit(1)
	}
}

// Parts of the measurement.
const (
	partPaths    = "paths"
	partFailover = "failover"
)

func (o *options) run(ctx context.Context) error {
	switch o.inside {
	case partPaths:
		return o.measure(ctx)
	case partFailover:
		return o.measureFailover(ctx)
	}
	boot := map[string]func(context.Context) error{partPaths: o.bootPaths, partFailover: o.bootFailover}
	var errs []error
	for _, p := range o.parts {
		if boot[p] == nil {
			return fmt.Errorf("part %q: want %s or %s", p, partPaths, partFailover)
		}
	}
	for _, p := range o.peerings {
		if p != string(v2.EgressPeeringService) && p != string(v2.EgressPeeringDirect) {
			return fmt.Errorf("peering %q: want %s or %s", p, v2.EgressPeeringService, v2.EgressPeeringDirect)
		}
	}
	for _, p := range o.parts {
		errs = append(errs, boot[p](ctx))
	}
	return errors.Join(errs...)
}

// Report is what is measured.
type Report struct {
	Conditions figures.Conditions `json:"conditions"`
	// Paths has one for each family and number of clients.
	Paths []Path `json:"paths"`
	// Syncs has one for each number of clients.
	Syncs []Sync `json:"syncs"`
}

// Path compares the paths through routers of Coil with that made by hand, and with each other.
type Path struct {
	Family  string `json:"family"`
	Clients int    `json:"clients"`
	// TCP is in Mbit/s, RTT the median of a turn's pings in milliseconds.
	TCP Turns `json:"tcp_mbit_per_s"`
	RTT Turns `json:"rtt_ms"`
}

// Turns are the values of turns that followed each other: by hand, by Coil with the peerings, by Coil with floating addresses, and by hand
// from a client without Coil.
type Turns struct {
	Hand     []float64 `json:"hand"`
	Plain    []float64 `json:"plain"`
	Service  []float64 `json:"service"`
	Direct   []float64 `json:"direct"`
	Floating []float64 `json:"floating"`
}

// add adds the value of a path's turn.
func (t *Turns) add(via int, value float64) {
	values := [paths]*[]float64{viaHand: &t.Hand, viaService: &t.Service, viaDirect: &t.Direct, viaFloating: &t.Floating, viaPlain: &t.Plain}[via]
	*values = append(*values, value)
}

// ratios are values by those of the same turns to which they are compared, sorted.
func ratios(values, to []float64) []float64 {
	var rs []float64
	for i := range to {
		rs = append(rs, values[i]/to[i])
	}
	slices.Sort(rs)
	return rs
}

// Sync is how long a router's objects take to be made, dual stack.
type Sync struct {
	Clients int `json:"clients"`
	// All is for all of them into an empty kernel, None for nothing to do, One for one more
	// client, in milliseconds.
	All  float64 `json:"all_ms"`
	None float64 `json:"none_ms"`
	One  float64 `json:"one_ms"`
}

// modules are those of the kernel that the paths need.
var modules = []string{"fou", "fou6", "ipip", "ip6_tunnel", "veth", "nf_tables", "nft_chain_nat", "nft_masq", "nft_nat", "nft_ct"}

// bootPaths runs the comparison in a machine, and tells what came of it.
func (o *options) bootPaths(ctx context.Context) error {
	folder, err := figures.Folder(o.out)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	var out bytes.Buffer
	args := []string{"sh", "-c", "modprobe -a " + strings.Join(modules, " ") + ` && exec "$@"`, "sh",
		self, "--" + inside + "=" + partPaths, fmt.Sprint("--pairs=", o.pairs), fmt.Sprint("--seconds=", o.seconds)}
	for _, n := range o.clients {
		args = append(args, fmt.Sprint("--clients=", n))
	}
	if err := vm.Run(ctx, vm.Options{Kernel: o.kernel, Args: args, Memory: 4096, Counted: true, Stdout: &out, Stderr: os.Stderr, Log: os.Stderr}); err != nil {
		return fmt.Errorf("in the machine: %w", err)
	}
	var r Report
	if err := json.Unmarshal(out.Bytes(), &r); err != nil {
		return fmt.Errorf("read what was measured: %w", err)
	}
	all := r.figures()
	fmt.Println(r.Conditions)
	return errors.Join(
		figures.Write(filepath.Join(folder, "egress.json"), r),
		figures.Write(filepath.Join(folder, "egress-targets.json"), all),
		all.Print(os.Stdout), all.Verdict(),
	)
}

// Targets are ratios. slower is the least throughput, and later the longest round trip, of Coil to the path made by hand, and of Direct to Service.
// withAddresses is the least ratio of an Egress with floating addresses to one without.
const (
	slower, later = 0.95, 1.05
	withAddresses = 0.97
)

// figures compares the report with the targets.
func (r Report) figures() figures.Figures {
	var all figures.Figures
	first := r.Paths[0].Clients
	for _, p := range r.Paths {
		name := func(what string) string { return fmt.Sprintf("%s, %d clients, %s", p.Family, p.Clients, what) }
		all.Note(name("TCP by hand"), "Mbit/s", median(p.TCP.Hand))
		all.Note(name("TCP by hand, client without Coil"), "Mbit/s", median(p.TCP.Plain))
		all.Note(name("TCP by Coil"), "Mbit/s", median(p.TCP.Service))
		all.Note(name("TCP by Coil, Direct"), "Mbit/s", median(p.TCP.Direct))
		all.Note(name("TCP by Coil, floating addresses"), "Mbit/s", median(p.TCP.Floating))
		if p.Clients == first {
			all.Note(name("round trip by hand"), "ms", median(p.RTT.Hand))
			all.Note(name("round trip by hand, client without Coil"), "ms", median(p.RTT.Plain))
			all.Note(name("round trip by Coil"), "ms", median(p.RTT.Service))
			all.Note(name("round trip by Coil, Direct"), "ms", median(p.RTT.Direct))
			all.Note(name("round trip by Coil, floating addresses"), "ms", median(p.RTT.Floating))
		}
		for _, c := range []struct {
			what     string
			tcp, rtt []float64
		}{
			{"Coil to hand", ratios(p.TCP.Service, p.TCP.Hand), ratios(p.RTT.Service, p.RTT.Hand)},
			{"Direct to Service", ratios(p.TCP.Direct, p.TCP.Service), ratios(p.RTT.Direct, p.RTT.Service)},
		} {
			all.Note(name("TCP, "+c.what+", median"), "", median(c.tcp))
			if p.Clients == first {
				all.AtLeast(name("TCP, "+c.what+", lower 95 % bound of the median"), "", lowerBound(c.tcp), slower)
				all.AtMost(name("round trip, "+c.what+", median"), "", median(c.rtt), later)
			}
		}
		for _, c := range []struct {
			what   string
			ratios []float64
		}{
			{"TCP, floating addresses to Service", ratios(p.TCP.Floating, p.TCP.Service)},
			{"round trip, Service to floating addresses", ratios(p.RTT.Service, p.RTT.Floating)},
		} {
			if p.Clients == first {
				all.AtLeast(name(c.what+", median"), "", median(c.ratios), withAddresses)
				all.AtLeast(name(c.what+", lower 95 % bound of the median"), "", lowerBound(c.ratios), slower)
			}
		}
	}
	for _, s := range r.Syncs {
		all.Note(fmt.Sprintf("%d clients, all made", s.Clients), "ms", s.All)
		all.Note(fmt.Sprintf("%d clients, nothing to do", s.Clients), "ms", s.None)
		all.Note(fmt.Sprintf("%d clients, one more", s.Clients), "ms", s.One)
	}
	return all
}

// median is that of some values.
func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	if len(sorted) == 0 {
		return 0
	}
	return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2
}

// lowerBound is the largest of some sorted values that the median of their distribution is at
// least with 95 % confidence, whatever the distribution: by the sign test.
func lowerBound(sorted []float64) float64 {
	n := len(sorted)
	if n == 0 {
		return 0
	}
	// P(at most k of n values are below the median) for a fair coin.
	p, sum := 1.0, 0.0
	for range n {
		p /= 2
	}
	k := 0
	for ; k < n; k++ {
		if sum += p; sum > 0.05 {
			break
		}
		p = p * float64(n-k) / float64(k+1)
	}
	return sorted[max(k-1, 0)]
}

// families are what is measured.
var families = []dataplane.Family{dataplane.IPv4, dataplane.IPv6}
