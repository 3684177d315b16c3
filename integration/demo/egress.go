package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"

	"github.com/coil-net/coil/integration/lab/cluster"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// partner has the addresses of a host outside of the cluster, which tells visitors from where they come.
var partner = []netip.Addr{netip.MustParseAddr("203.0.113.10"), netip.MustParseAddr("2001:db8:1::10")}

// inMachine is how leave is seen where the kernel can't make tunnels.
const inMachine = "COIL_TEST_TIERS=unit,apiserver,vm go test -v -timeout=1h -run TestEgress ./integration/egress/cluster/"

// leave shows a tenant's pod that leaves the cluster by an address of its own.
func (d demo) leave(ctx context.Context) error {
	if _, err := d.Exec(ctx, d.Nodes()[0], "ip", "fou", "show"); err != nil {
		step("Left out: a tenant's pod that leaves by its own address")
		fmt.Printf("The kernel of this machine has no Foo over UDP (modules fou, fou6, ipip, ip6_tunnel), by which pods reach routers.\n"+
			"A virtual machine with Debian's kernel shows it: %s\n", inMachine)
		return nil
	}
	step("A tenant's pod leaves the cluster by an address of its own, which a host outside sees")
	end, err := d.startPartner(ctx)
	if err != nil {
		return fmt.Errorf("start the host outside: %w", err)
	}
	defer end()
	if err := d.apply(ctx, "egress.yaml"); err != nil {
		return err
	}
	for _, args := range [][]string{
		{"-n", "internet", "wait", "egress/partners", "--for=condition=AddressesReady", "--timeout=180s"},
		{"-n", "shop", "wait", "egresspolicy/partners", "--for=condition=Accepted", "--timeout=60s"},
		{"-n", "shop", "wait", "pod/shop", "--for=condition=Ready", "--timeout=180s"},
		{"-n", "shop", "get", "egresspolicies", "-o", "wide"},
		{"get", "addressblocks", "-l", "coil.cybozu.com/floating=true", "-o", "wide"},
	} {
		if _, err := d.kubectl(ctx, args...); err != nil {
			d.explain(ctx, "shop")
			return err
		}
	}
	return d.visit(ctx)
}

// startPartner starts the host outside, where the nodes' default routes lead.
func (d demo) startPartner(ctx context.Context) (end func(), err error) {
	for _, a := range partner {
		if _, err := d.Exec(ctx, cluster.Fabric, "ip", "address", "add", a.String(), "dev", "lo"); err != nil {
			return nil, err
		}
	}
	path, err := d.NetNS(cluster.Fabric)
	if err != nil {
		return nil, err
	}
	fabric, err := netlab.Open(path)
	if err != nil {
		return nil, err
	}
	l, err := fabric.Listen(ctx, "tcp", ":8080")
	if err != nil {
		return nil, errors.Join(err, fabric.Close())
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		from, _, _ := net.SplitHostPort(r.RemoteAddr)
		w.Header().Set("Connection", "close")
		_, _ = io.WriteString(w, strings.TrimPrefix(from, "::ffff:")) // a visitor who has left needs no answer
	})}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = server.Serve(l) // ends by Close
	}()
	return func() {
		_ = server.Close()
		<-ended
		_ = fabric.Close()
	}, nil
}

// visit lets the tenant's pod ask the host outside from where it comes: by the address of its policy, in both families.
func (d demo) visit(ctx context.Context) error {
	out, err := d.Kubectl(ctx, "-n", "shop", "get", "egresspolicy", "partners", "-o", "jsonpath={.status.resolved.address.ipv4} {.status.resolved.address.ipv6}")
	if err != nil {
		return err
	}
	want := strings.Fields(string(out))
	var seen []string
	for _, a := range partner {
		url := fmt.Sprintf("http://%s/", netip.AddrPortFrom(a, 8080))
		// Routers learn of a new client a moment later.
		get := fmt.Sprintf("for i in 1 2 3 4 5; do timeout 5 wget -q -O- %s && exit; sleep 1; done", url)
		out, err := d.Kubectl(ctx, "-n", "shop", "exec", "shop", "--", "sh", "-c", get)
		if err != nil {
			return fmt.Errorf("the pod shop/shop doesn't reach %s: %w", url, err)
		}
		fmt.Printf("shop/shop asks %-32s who answers that it comes from %s\n", url, out)
		seen = append(seen, string(out))
	}
	if len(want) != len(partner) || !slices.Equal(seen, want) {
		return fmt.Errorf("the pod shop/shop leaves by %v, and its policy says %v", seen, want)
	}
	return nil
}
