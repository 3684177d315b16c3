package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/coil-net/coil/integration/audit"
	"github.com/coil-net/coil/integration/rig"
)

const (
	// account is the ServiceAccount of coild.
	account = "coild"
	// groupPrefix and the name of a node are a group, by which the audit log tells the
	// coilds apart, as a bound token's node name does in a cluster.
	groupPrefix = "coil-scale:"
)

// requestCount is how often coilds asked for something: all of them together, and the
// one that did least and most.
type requestCount struct {
	Verb    string `json:"verb"`
	Subject string `json:"subject"`
	All     int    `json:"all"`
	Least   int    `json:"least"`
	Most    int    `json:"most"`
	Allowed bool   `json:"allowed"`
}

// measureCoilds runs many coilds at one API server, attaches a pod on each node, and
// counts what they asked for.
func measureCoilds(ctx context.Context, o options, rep *report) error {
	c, err := countRequests(ctx, o)
	if err != nil {
		return err
	}
	rep.Requests = c.counts
	rep.Figures.Note(fmt.Sprintf("%d coilds: start of the first to ready of the last", o.coilds), "s", c.ready.Seconds())
	watches, most := 0, 0
	for _, r := range c.counts {
		if r.Verb == "list" || r.Verb == "watch" {
			watches += r.All
		}
		if r.Verb == "watch" {
			most = max(most, r.Most)
		}
	}
	// Each coild has one pod, of which it lists the policies of the namespace and of the cluster.
	allowed := len(audit.Allowed(account)) + 2
	rep.Figures.AtMost(fmt.Sprintf("%d coilds: LISTs and WATCHes per coild from start on", o.coilds), "", float64(watches)/float64(o.coilds), float64(allowed)*1.2)
	rep.Figures.AtMost("of one coild, the most watches of the same resource", "", float64(most), 2)
	rep.Figures.AtMost("LISTs and WATCHes that must not or should be there", "", float64(len(c.problems)), 0)
	rep.Figures.Note(fmt.Sprintf("%d coilds at rest: requests per minute together", o.coilds), "", float64(c.quiet)/o.quiet.Minutes())
	for _, p := range c.problems {
		fmt.Fprintln(o.log, "coild:", p)
	}
	return nil
}

// counted is what coilds asked for.
type counted struct {
	counts   []requestCount
	problems []string
	ready    time.Duration
	// quiet counts the requests at rest.
	quiet int
}

func countRequests(ctx context.Context, o options) (c counted, err error) {
	dir, err := os.MkdirTemp("", "coil-scale-")
	if err != nil {
		return c, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	log, err := audit.New(dir, account)
	if err != nil {
		return c, err
	}
	r, err := rig.New(ctx, rig.Options{Log: o.log, APIServerArgs: log.APIServerArgs()})
	if err != nil {
		return c, err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	if err := r.AddPool(ctx, "default", 5, rig.Dual("10.0.0.0/16", "fd00::/112")); err != nil {
		return c, err
	}
	began := time.Now()
	nodes, err := addNodes(ctx, r, dir, o.coilds)
	if err != nil {
		return c, err
	}
	c.ready = time.Since(began)
	err = eachNode(ctx, nodes, func(ctx context.Context, n *rig.Node) error {
		s, err := n.NewSandbox(ctx, rig.SandboxOptions{})
		if err != nil {
			return err
		}
		_, err = s.AddRPC(ctx)
		return err
	})
	if err != nil {
		return c, err
	}
	if err := c.rest(ctx, log, o.quiet); err != nil {
		return c, err
	}
	return c, c.count(log, nodes)
}

// rest waits until the coilds have done what follows an ADD, then for a while more.
func (c *counted) rest(ctx context.Context, log audit.Log, quiet time.Duration) error {
	seen := -1
	for tick := time.NewTicker(2 * time.Second); ; {
		rs, err := log.Requests(account)
		if err != nil {
			return err
		}
		if len(rs) == seen {
			tick.Stop()
			break
		}
		seen = len(rs)
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	select {
	case <-time.After(quiet):
	case <-ctx.Done():
		return ctx.Err()
	}
	rs, err := log.Requests(account)
	c.quiet = len(rs) - seen
	return err
}

// addNodes adds nodes whose coilds have the rights of the ServiceAccount and a group of
// their own.
func addNodes(ctx context.Context, r *rig.Rig, dir string, n int) ([]*rig.Node, error) {
	nodes := make([]*rig.Node, n)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(4) // each start wants a processor of its own
	for i := range nodes {
		group.Go(func() error {
			name := fmt.Sprintf("coild-%d", i)
			cfg, err := r.API.UserConfig(audit.User(account), "system:serviceaccounts", "system:serviceaccounts:kube-system", groupPrefix+name)
			if err != nil {
				return err
			}
			kubeconfig := filepath.Join(dir, name+".kubeconfig")
			if err := writeKubeconfig(cfg, kubeconfig); err != nil {
				return err
			}
			nodes[i], err = r.AddNode(ctx, rig.NodeOptions{Name: name, CoildFlags: []string{"--kubeconfig=" + kubeconfig}})
			return err
		})
	}
	return nodes, group.Wait()
}

func writeKubeconfig(cfg *rest.Config, path string) error {
	k := clientcmdapi.NewConfig()
	k.Clusters["scale"] = &clientcmdapi.Cluster{Server: cfg.Host, CertificateAuthorityData: cfg.CAData}
	k.AuthInfos["scale"] = &clientcmdapi.AuthInfo{ClientCertificateData: cfg.CertData, ClientKeyData: cfg.KeyData}
	k.Contexts["scale"] = &clientcmdapi.Context{Cluster: "scale", AuthInfo: "scale"}
	k.CurrentContext = "scale"
	return clientcmd.WriteToFile(*k, path)
}

func eachNode(ctx context.Context, nodes []*rig.Node, do func(context.Context, *rig.Node) error) error {
	return each(ctx, len(nodes), func(ctx context.Context, i int) error { return do(ctx, nodes[i]) })
}

// count sorts the requests by what they ask for.
func (c *counted) count(log audit.Log, nodes []*rig.Node) error {
	rs, err := log.Requests(account)
	if err != nil {
		return err
	}
	var names []string
	for _, n := range nodes {
		names = append(names, n.Name)
	}
	if c.problems, err = audit.Problems(account, rs, names); err != nil {
		return err
	}
	type what struct{ verb, subject string }
	counts := map[what]map[string]int{} // by node
	for _, r := range rs {
		node := nodeOf(r)
		// A coild's own node is NODE, that of another one isn't.
		subject, ok, err := r.Subject([]string{node})
		if err != nil {
			return err
		}
		if !ok {
			subject = kindOf(r)
		}
		w := what{r.Verb, subject}
		if counts[w] == nil {
			counts[w] = map[string]int{}
		}
		counts[w][node]++
		if ok && !audit.May(account, subject) {
			c.problems = append(c.problems, fmt.Sprintf("coild of %s: %s %s", node, r.Verb, subject))
		}
	}
	for _, subject := range audit.Allowed(account) {
		for _, name := range names {
			if counts[what{"watch", subject}][name] == 0 {
				c.problems = append(c.problems, fmt.Sprintf("coild of %s does not watch %s", name, subject))
			}
		}
	}
	for w, by := range counts {
		n := requestCount{Verb: w.verb, Subject: w.subject, Allowed: w.verb != "list" && w.verb != "watch" || audit.May(account, w.subject)}
		for _, name := range names {
			n.All += by[name]
			n.Most = max(n.Most, by[name])
		}
		n.Least = n.Most
		for _, name := range names {
			n.Least = min(n.Least, by[name])
		}
		c.counts = append(c.counts, n)
	}
	slices.SortFunc(c.counts, func(a, b requestCount) int {
		return cmp.Or(cmp.Compare(order(a.Verb), order(b.Verb)), cmp.Compare(a.Verb, b.Verb), cmp.Compare(a.Subject, b.Subject))
	})
	return nil
}

// order has lists and watches first.
func order(verb string) int { return -slices.Index([]string{"watch", "list"}, verb) }

// nodeOf is the node of the coild that made a request.
func nodeOf(r audit.Request) string {
	for _, g := range r.User.Groups {
		if name, ok := strings.CutPrefix(g, groupPrefix); ok {
			return name
		}
	}
	return ""
}

// kindOf is the resource of a request without the names in its path, since there are as
// many as nodes.
func kindOf(r audit.Request) string {
	p := strings.Split(r.Path(), "/")
	for i, elem := range p {
		switch elem {
		case "nodes", "pods", "events", "addressblocks", "blockrequests", "namespaces":
			if i+1 < len(p) {
				p[i+1] = "*"
			}
		}
	}
	return strings.Join(p, "/")
}
