// Command scale measures Coil where clusters are large: coil-ipam-controller with
// thousands of Nodes and AddressBlocks, hundreds of coilds at one API server, pods of
// one pool while another pool's block is late, an Egress whose thousands of clients come
// and go, thousands of Services and the gateway machines that serve them, an exhausted pool that
// thousands of nodes ask, a router that dies for all, an API server that refuses all requests
// for a while, and an operator who looks at all of it.
//
// It owns the objects that it measures with and the targets. It must not know how any
// of the programs works inside. Of thousands of nodes it runs only the loops that are
// measured, in one process.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"

	"github.com/coil-net/coil/integration/bench/figures"
)

// options are the command line.
type options struct {
	parts                  []string
	nodes, blocks          int
	singles, burst, coilds int
	// clients are those of one Egress, of which the measured node has some here.
	clients, here int
	// policies choose the clients of an Egress with so many addresses. Then so many clients change to other policies.
	policies, addresses, changes int
	// services are those with addresses, beside which so many more come. At gateways each has so many endpoints, which change for so long.
	services, endpoints int
	following           time.Duration
	// pairs are how many times packets by a gateway and by kube-proxy are compared.
	pairs int
	// profiles has profiles of coil-lb-agent written beside the results.
	profiles     bool
	delay, quiet time.Duration
	// window is for how long clients come and go, and exhausted for how long nodes ask.
	window, exhausted time.Duration
	// refusedCoilds are refused, for so long, after restarted of them have started at once.
	refusedCoilds, restarted int
	refused                  time.Duration
	hold                     bool
	out                      string
	log                      io.Writer
}

func main() {
	playRunner()
	playClientNode()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	rest.SetDefaultWarningHandler(rest.NoWarnings{}) // one about the name of the finalizer in each answer
	o := options{log: os.Stderr}
	pflag.StringSliceVar(&o.parts, "parts", []string{"controller", "stall", "coilds", "clients", "policies", "services", "gateway", "translation", "exhausted", "deaths", "refusals", "status"}, "what to measure")
	pflag.IntVar(&o.nodes, "nodes", 5000, "Nodes of the controller's cluster")
	pflag.IntVar(&o.blocks, "blocks", 20000, "AddressBlocks of the controller's cluster")
	pflag.IntVar(&o.singles, "singles", 200, "BlockRequests made one by one")
	pflag.IntVar(&o.burst, "burst", 3000, "BlockRequests made at once")
	pflag.IntVar(&o.coilds, "coilds", 200, "coilds at one API server")
	pflag.IntVar(&o.clients, "clients", 10000, "clients of the Egress")
	pflag.IntVar(&o.here, "here", 50, "of these, on the node that is measured")
	pflag.IntVar(&o.policies, "policies", 1000, "EgressPolicies that choose clients")
	pflag.IntVar(&o.addresses, "addresses", 256, "floating addresses of the Egress whose clients policies choose")
	pflag.IntVar(&o.changes, "changes", 200, "pods whose label changes, and Services that come, one after another")
	pflag.IntVar(&o.services, "services", 5000, "Services that get addresses")
	pflag.IntVar(&o.endpoints, "endpoints", 20, "endpoints of each Service that gateways serve")
	pflag.DurationVar(&o.following, "following", time.Minute, "for how long endpoints of Services that gateways serve change")
	pflag.IntVar(&o.pairs, "pairs", 200, "how many times packets by a gateway and by kube-proxy are compared")
	pflag.BoolVar(&o.profiles, "profiles", false, "write profiles of coil-lb-agent into the folder of the results")
	pflag.DurationVar(&o.window, "window", 90*time.Second, "for how long clients of the Egress come and go, and are left alone before")
	pflag.DurationVar(&o.exhausted, "exhausted", 8*time.Minute, "for how long an exhausted pool is looked at after all nodes were refused once")
	pflag.IntVar(&o.refusedCoilds, "refused-coilds", 1000, "coilds that an API server refuses")
	pflag.IntVar(&o.restarted, "restarted", 500, "of these, those that start at once before")
	pflag.DurationVar(&o.refused, "refused", 2*time.Minute, "for how long it refuses them")
	pflag.DurationVar(&o.delay, "delay", 9*time.Second, "how late the block of another pool is")
	pflag.DurationVar(&o.quiet, "quiet", 20*time.Second, "for how long coilds that have nothing to do are looked at")
	pflag.BoolVar(&o.hold, "hold", false, "only make the controller's cluster and wait, for profiles of a controller that is started by hand")
	pflag.StringVar(&o.out, "out", "", "folder of the results; the default is integration/bench/out")
	pflag.Parse()
	err := run(ctx, o, os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "scale:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options, out io.Writer) (err error) {
	if o.out, err = figures.Folder(o.out); err != nil {
		return err
	}
	if o.hold {
		return hold(ctx, o, out)
	}
	rep := newReport()
	for _, part := range o.parts {
		measure := map[string]func(context.Context, options, *report) error{
			"controller": measureController, "stall": measureStall, "coilds": measureCoilds,
			"clients": measureClients, "policies": measurePolicies, "services": measureServices, "gateway": measureGateway, "translation": measureTranslation, "exhausted": measureExhausted, "deaths": measureDeaths, "refusals": measureRefusals, "status": measureStatus,
		}[part]
		if measure == nil {
			return fmt.Errorf("there is no part %q", part)
		}
		if err := measure(ctx, o, rep); err != nil {
			return fmt.Errorf("measure %s: %w", part, err)
		}
	}
	return errors.Join(rep.write(filepath.Join(o.out, "scale.json")), rep.print(out))
}
