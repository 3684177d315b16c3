package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/coil-net/coil/integration/bench/figures"
	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/integration/lab/controlplane"
	"github.com/coil-net/coil/integration/lab/vm"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// Failovers is what is measured when the node of a router loses its power.
type Failovers struct {
	Conditions figures.Conditions `json:"conditions"`
	Variants   []Failover         `json:"variants"`
}

// Failover has, for each time that the power went, when new flows of a client passed again, in seconds.
type Failover struct {
	Family string `json:"family"`
	// Peering is that of the Egress: Service or Direct.
	Peering string `json:"peering"`
	// SourcePort is fixed or auto, as of spec.fouSourcePortAuto.
	SourcePort string `json:"source_port"`
	// Unlisted is from the power-off until the EndpointSlice stops listing the router as ready; none if
	// nobody waited for that.
	Unlisted []float64 `json:"power_off_to_unlisted_s"`
	// FromPowerOff and FromUnlisted are until the first new flow passes that uses the Service, or until all
	// do that use the routers. The latter don't wait until one is unlisted.
	FromPowerOff []float64 `json:"power_off_to_recovery_s"`
	FromUnlisted []float64 `json:"unlisted_to_recovery_s"`
}

// bootFailover starts a control plane here, where that takes seconds, and measures in a machine.
func (o *options) bootFailover(ctx context.Context) (err error) {
	folder, err := figures.Folder(o.out)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	bin, err := (&build.Builder{Log: os.Stderr}).Programs(ctx, "kube-proxy")
	if err != nil {
		return err
	}
	api, err := controlplane.StartAPI(ctx, controlplane.Options{Advertise: vm.HostAddr, Log: os.Stderr})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, api.Stop()) }()
	if err := api.StartControllerManager(ctx); err != nil {
		return err
	}
	var out bytes.Buffer
	err = vm.Run(ctx, vm.Options{
		Kernel: o.kernel, Memory: 4096, Network: true, Stdout: &out, Stderr: os.Stderr, Log: os.Stderr,
		Args: []string{"sh", "-c", `modprobe -a virtio_net fou fou6 ipip ip6_tunnel veth nf_tables nf_conntrack_netlink nft_chain_nat nft_masq ` +
			`nft_nat nft_ct nft_fib_inet nft_reject_inet nft_numgen nft_hash nft_limit nft_log && exec "$@"`, "sh",
			self, "--" + inside + "=" + partFailover, fmt.Sprint("--rounds=", o.rounds), "--peerings=" + strings.Join(o.peerings, ","),
			"--api-dir=" + api.Dir(), fmt.Sprint("--api-port=", api.Addr().Port()), bin["kube-proxy"]},
	})
	if err != nil {
		return fmt.Errorf("in the machine: %w", err)
	}
	var r Failovers
	if err := json.Unmarshal(out.Bytes(), &r); err != nil {
		return fmt.Errorf("read what was measured: %w", err)
	}
	all := r.figures()
	fmt.Println(r.Conditions)
	return errors.Join(
		figures.Write(filepath.Join(folder, "egress-failover.json"), r),
		figures.Write(filepath.Join(folder, "egress-failover-targets.json"), all),
		r.print(os.Stdout), all.Print(os.Stdout), all.Verdict(),
	)
}

// print prints a table in Markdown: medians, and in brackets from the least to the most.
func (r Failovers) print(w io.Writer) error {
	var b bytes.Buffer
	b.WriteString("| | peering | source port | power-off to unlisted | unlisted to recovery | power-off to recovery |\n|---|---|---|---|---|---|\n")
	cell := func(values []float64) string {
		if len(values) == 0 {
			return "-"
		}
		return fmt.Sprintf("%.1f s (%.1f–%.1f)", median(values), slices.Min(values), slices.Max(values))
	}
	for _, v := range r.Variants {
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s |\n", v.Family, v.Peering, v.SourcePort, cell(v.Unlisted), cell(v.FromUnlisted), cell(v.FromPowerOff))
	}
	_, err := w.Write(b.Bytes())
	return err
}

// soon is when clients that use the routers themselves have left one that lost its power, in seconds.
const soon = 5

// figures compares the clients that use the routers themselves with the target.
func (r Failovers) figures() figures.Figures {
	var all figures.Figures
	for _, v := range r.Variants {
		if v.Peering != string(v2.EgressPeeringDirect) {
			continue
		}
		var times []time.Duration
		for _, s := range v.FromPowerOff {
			times = append(times, time.Duration(s*float64(time.Second)))
		}
		name := func(what string) string { return fmt.Sprintf("%s, Direct, power-off to recovery, %s", v.Family, what) }
		all.Note(name("median"), "s", median(v.FromPowerOff))
		all.AtMost(name("p99"), "s", figures.NearestRank(times, 0.99).Seconds(), soon)
		all.Note(name("longest"), "s", slices.Max(v.FromPowerOff))
	}
	return all
}
