// Command demo shows Coil at work: it starts a cluster on this machine, installs
// Coil as a user does, and lets pods reach each other, and leave by an address of
// their own where the kernel can. Its exit status is 0 only
// if everything that it shows worked.
//
// Everything is removed at the end, whatever happened; --keep leaves the cluster
// for a look around.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/integration/lab/cluster"
)

const name = "demo"

func main() { os.Exit(run()) }

func run() int {
	keep := flag.Bool("keep", false, "leave the cluster; 'go run ./integration/lab down --name demo' removes it")
	nodes := flag.Int("nodes", 3, "number of nodes")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()

	start := time.Now()
	err := show(ctx, *nodes)
	if *keep {
		kept(ctx)
	} else if downErr := down(); downErr != nil {
		err = errors.Join(err, fmt.Errorf("remove the cluster: %w", downErr))
	}
	took := time.Since(start).Round(time.Second)
	if err != nil {
		fmt.Printf("\nFAILED after %s: %v\n", took, err)
		return 1
	}
	fmt.Printf("\nOK: every pod reached every other over IPv4, IPv6 and the Service, in %s\n", took)
	return 0
}

// down removes the cluster, also after an interrupt.
func down() error {
	step("Removing the cluster")
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	return cluster.Down(ctx, cluster.DefaultStateDir, name)
}

func kubeconfig() string {
	c, err := cluster.Open(cluster.DefaultStateDir, name)
	if err != nil {
		return "(" + err.Error() + ")"
	}
	return c.Kubeconfig()
}

func step(format string, args ...any) { fmt.Printf("\n==> "+format+"\n", args...) }

// demo is a running cluster.
type demo struct{ *cluster.Cluster }

func show(ctx context.Context, nodes int) error {
	step("Starting a cluster of %d nodes and installing Coil (the first time, Kubernetes is built: about 10 minutes)", nodes)
	opts := cluster.Options{Name: name, Nodes: nodes, Log: os.Stdout}
	if err := opts.AddCoil(ctx); err != nil {
		return err
	}
	c, err := cluster.Up(ctx, opts)
	if err != nil {
		return err
	}
	if err := errors.Join(c.WaitReady(ctx), c.WaitWorkloads(ctx, "kube-system")); err != nil {
		return err
	}
	d := demo{c}
	if _, err := d.kubectl(ctx, "get", "nodes", "-o", "wide"); err != nil {
		return err
	}
	for _, f := range []func(context.Context) error{d.makePools, d.makePods, d.reach, d.look, d.leave, d.ask} {
		if err := f(ctx); err != nil {
			return err
		}
	}
	return nil
}

// kubectl runs kubectl, shows the command and returns what it prints.
func (d demo) kubectl(ctx context.Context, args ...string) (string, error) {
	fmt.Println("$ kubectl", strings.Join(args, " "))
	out, err := d.Kubectl(ctx, args...)
	fmt.Print(string(out))
	if err != nil {
		return "", fmt.Errorf("kubectl %s: %w", strings.Join(args, " "), err)
	}
	return string(out), nil
}

func (d demo) apply(ctx context.Context, file string) error {
	root, err := build.Root()
	if err != nil {
		return err
	}
	_, err = d.kubectl(ctx, "apply", "-f", filepath.Join(root, "integration/demo", file))
	return err
}

func (d demo) makePools(ctx context.Context) error {
	step("Creating two dual-stack AddressPools; namespace \"blue\" chooses the second by annotation")
	return d.apply(ctx, "pools.yaml")
}

func (d demo) makePods(ctx context.Context) error {
	step("Starting pods on all nodes, and a Service before them")
	if err := d.apply(ctx, "pods.yaml"); err != nil {
		return err
	}
	for _, ns := range []string{"default", "blue"} {
		if _, err := d.kubectl(ctx, "-n", ns, "rollout", "status", "deployment/web", "--timeout=180s"); err != nil {
			d.explain(ctx, ns)
			return err
		}
	}
	_, err := d.kubectl(ctx, "get", "pods", "-A", "-l", "app=web", "-o", "wide")
	return err
}

// explain shows why pods did not start.
func (d demo) explain(ctx context.Context, ns string) {
	for _, args := range [][]string{
		{"get", "pods", "-A", "-o", "wide"},
		{"-n", ns, "get", "events"},
		{"-n", "kube-system", "logs", "-l", "app.kubernetes.io/name=coil", "--all-containers", "--prefix", "--tail=30"},
	} {
		if _, err := d.kubectl(ctx, args...); err != nil {
			fmt.Println(err)
		}
	}
}

// pod is a running pod of the demo.
type pod struct{ namespace, name, node, ipv4, ipv6 string }

func (d demo) pods(ctx context.Context) ([]pod, error) {
	const columns = `{range .items[*]}{.metadata.namespace} {.metadata.name} {.spec.nodeName} {.status.podIPs[0].ip} {.status.podIPs[1].ip}{"\n"}{end}`
	out, err := d.Kubectl(ctx, "get", "pods", "-A", "-l", "app=web", "--field-selector=status.phase=Running", "-o", "jsonpath="+columns)
	if err != nil {
		return nil, err
	}
	var pods []pod
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		if len(f) != 5 {
			return nil, fmt.Errorf("pod without two addresses: %q", line)
		}
		pods = append(pods, pod{f[0], f[1], f[2], f[3], f[4]})
	}
	return pods, nil
}

// awaitService waits until the Service has an endpoint for each of its pods: kube-proxy
// follows within a second.
func (d demo) awaitService(ctx context.Context) error {
	_, err := d.Kubectl(ctx, "wait", "endpointslices", "-l", "kubernetes.io/service-name=web", "--timeout=60s",
		"--for=jsonpath={.endpoints[5].conditions.ready}=true")
	if err != nil {
		return fmt.Errorf("wait for the endpoints of the Service: %w", err)
	}
	return nil
}

// reach lets every pod ping every other, and fetch a page by the Service.
func (d demo) reach(ctx context.Context) error {
	step("Every pod pings every other over IPv4 and IPv6, and fetches a page through the ClusterIPs")
	if err := d.awaitService(ctx); err != nil {
		return err
	}
	pods, err := d.pods(ctx)
	if err != nil {
		return err
	}
	ips, err := d.Kubectl(ctx, "get", "service", "web", "-o", "jsonpath={.spec.clusterIPs[*]}")
	if err != nil {
		return err
	}
	failed := 0
	for _, from := range pods {
		var script []string
		for _, to := range pods {
			for _, ip := range []string{to.ipv4, to.ipv6} {
				script = append(script, fmt.Sprintf("ping -q -c1 -W3 %s >/dev/null || echo %s of %s", ip, ip, to.name))
			}
		}
		for ip := range strings.FieldsSeq(string(ips)) {
			if strings.Contains(ip, ":") {
				ip = "[" + ip + "]"
			}
			// Two tries, since kube-proxy may be a second behind.
			get := fmt.Sprintf("timeout 5 wget -q -O- http://%s/ | grep -q hello", ip)
			script = append(script, fmt.Sprintf("%s || { sleep 2; %s; } || echo Service %s", get, get, ip))
		}
		out, err := d.Kubectl(ctx, "-n", from.namespace, "exec", from.name, "--", "sh", "-c", strings.Join(script, "\n"))
		if err != nil {
			return fmt.Errorf("exec in %s: %w", from.name, err)
		}
		verdict := "reached all"
		if unreached := strings.TrimSpace(string(out)); unreached != "" {
			failed++
			verdict = "did NOT reach " + strings.ReplaceAll(unreached, "\n", ", ")
		}
		fmt.Printf("%-8s %-22s on %-20s %-12s %-14s %s\n", from.namespace, from.name, from.node, from.ipv4, from.ipv6, verdict)
	}
	if failed > 0 || len(pods) < 4 {
		return fmt.Errorf("%d of %d pods did not reach all others", failed, len(pods))
	}
	return nil
}

// look shows what an operator sees.
func (d demo) look(ctx context.Context) error {
	step("What an operator sees")
	if _, err := d.kubectl(ctx, "get", "addresspools,addressblocks"); err != nil {
		return err
	}
	node := d.Nodes()[len(d.Nodes())-1]
	fmt.Println()
	for _, args := range [][]string{
		{"ip", "route", "show", "table", "119"},
		{"ip", "-6", "route", "show", "table", "119"},
		{"sqlite3", "-readonly", "-box", "/var/lib/coil/coild.db", "SELECT namespace, name, ipv4, ipv6, state, since FROM pods"},
	} {
		fmt.Println(node+"#", strings.Join(args, " "))
		out, err := d.Exec(ctx, node, args...)
		fmt.Print(string(out))
		if err != nil {
			return fmt.Errorf("%s on %s: %w", args[0], node, err)
		}
		if len(strings.TrimSpace(string(out))) == 0 {
			return fmt.Errorf("%s on %s shows nothing", strings.Join(args, " "), node)
		}
	}
	return nil
}
