package coilctl

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/diagnosis"
	"github.com/coil-net/coil/pkg/plan/preflight"
	"github.com/coil-net/coil/pkg/plan/selftest"
)

// selftestOptions are the flags of the command selftest.
type selftestOptions struct {
	*tool
	nodes                []string
	atOnce, port         int
	timeout              time.Duration
	image, pool          string
	tolerate, keepFailed bool
	// egresses are "namespace/name", and destinations ADDRESS:PORT.
	egresses, destinations []string
	servicePool            string
	// pullSecrets are "namespace/name".
	pullSecrets []string
}

// rightsOfSelftest are named by the help of the command.
const rightsOfSelftest = "It needs the rights to list namespaces, nodes and pods, and daemonsets of apps; to create and delete namespaces; to create serviceaccounts; to create, delete and " +
	"list pods, and to get and create pods/exec, in namespaces " + selftest.Prefix + "*; to get addresspools and list addressblocks of coil.cybozu.com. To try Egresses it also needs those to get and list " +
	"egresses of coil.cybozu.com, to create and get egresspolicies, and to list the pods of their routers; to try Services, those to create and get services, and to get leases of coordination.k8s.io in the " +
	"namespace " + preflight.Namespace + ": what isn't allowed is skipped. " +
	"--image-pull-secret needs those to get the Secret, and to create secrets in namespaces " + selftest.Prefix + "*. " +
	"What is wrong with the pods of a failed check is told with the rights of \"why pod\"."

// selftest returns the command that tries whether Coil does what it should.
func (t *tool) selftest() *cobra.Command {
	o := &selftestOptions{tool: t}
	c := &cobra.Command{
		Use: "selftest", Short: "Start pods on the nodes, and try whether their network works", Args: exactly(0),
		Long: "Start pods on the nodes, in a namespace of their own, and try whether their network works: that they get addresses of their pool, reach each other from node to node " +
			"with their own source addresses, and that packets as long as the MTU of their links pass; that they leave by Egresses, as an annotation or an EgressPolicy says, with the source " +
			"address of a router; and that a Service of the type LoadBalancer is reached, if coil-lb-controller runs.\n\n" +
			"Everything is removed at the end, also after an interrupt or when the terminal is closed, and what an earlier selftest has left is removed first: run one at a time. " +
			"The pods have no right, and run the image of coild, which the nodes have already. The exit code is 1 if a check has failed.\n\n" + rightsOfSelftest,
		Example: "  coilctl selftest\n  coilctl selftest --nodes=worker-1,worker-2 --keep-failed\n  coilctl selftest --at-once=20 -o json\n" +
			"  coilctl selftest --egress=internet/nat --destination=203.0.113.5:443",
		RunE: func(c *cobra.Command, _ []string) error { return o.run(c.Context()) },
	}
	c.Flags().StringSliceVar(&o.nodes, "nodes", nil, "names of the nodes to test; by default all that are ready and have coild")
	c.Flags().IntVar(&o.atOnce, "at-once", 50, "the most nodes that have pods at a time, 2 or more; others follow")
	c.Flags().DurationVar(&o.timeout, "timeout", time.Minute, "how long pods may take to start, and a check to succeed, before it has failed")
	c.Flags().StringVar(&o.image, "image", "", "image of the pods; by default that of coild")
	c.Flags().StringSliceVar(&o.pullSecrets, "image-pull-secret", nil, "Secrets with the credentials of the image's registry, NAMESPACE/NAME; they are copied into the namespace of the pods")
	c.Flags().StringVar(&o.pool, "pool", "", "AddressPool of the pods; by default "+v2.DefaultPool)
	c.Flags().IntVar(&o.port, "port", selftest.Port, "TCP and UDP port of the pods")
	c.Flags().BoolVar(&o.tolerate, "tolerate-all", true, "test nodes with taints, too, such as those of the control plane; false leaves them out")
	c.Flags().BoolVar(&o.keepFailed, "keep-failed", false, "keep the namespace and the pods of checks that have failed; the next selftest removes them")
	c.Flags().StringSliceVar(&o.egresses, "egress", nil, "Egresses to try, NAMESPACE/NAME; by default all, 8 at most")
	c.Flags().StringSliceVar(&o.destinations, "destination", nil, "ADDRESS:PORT outside of the cluster, where TCP connections by Egresses go; by default a pod in the network of a node, if the Egress captures that")
	c.Flags().StringVar(&o.servicePool, "service-pool", "", "AddressPool of the Service; by default that of coil-lb-controller")
	complete(c, "image-pull-secret", fixed(nil))
	complete(c, "egress", t.completeEgress)
	complete(c, "destination", fixed(nil))
	complete(c, "service-pool", t.completeNames(resourcePools))
	complete(c, "nodes", t.completeMore(resourceNodes))
	complete(c, "pool", t.completeNames(resourcePools))
	return c
}

func (o *selftestOptions) validate() error {
	var errs []error
	if o.atOnce < 2 {
		errs = append(errs, fmt.Errorf("--at-once can't be %d: it must be 2 or more", o.atOnce))
	}
	if o.port < 1024 || o.port > math.MaxUint16 {
		errs = append(errs, fmt.Errorf("--port can't be %d: it must be within 1024 and %d, since the pods have no right to others", o.port, math.MaxUint16))
	}
	if o.timeout < time.Second {
		errs = append(errs, fmt.Errorf("--timeout can't be %s: it must be a second or more", o.timeout))
	}
	named := func(flag string, all []string) {
		for _, n := range all {
			if namespace, name, _ := strings.Cut(n, "/"); namespace == "" || name == "" || strings.Contains(name, "/") {
				errs = append(errs, fmt.Errorf("%s can't be %q: it must be NAMESPACE/NAME", flag, n))
			}
		}
	}
	named("--egress", o.egresses)
	named("--image-pull-secret", o.pullSecrets)
	_, err := o.outside()
	return errors.Join(append(errs, err)...)
}

// outside parses the destinations.
func (o *selftestOptions) outside() (all []netip.AddrPort, err error) {
	for _, text := range o.destinations {
		to, err := destination(text)
		if err != nil {
			return nil, fmt.Errorf("--destination: %w", err)
		}
		if to.Port() == 0 {
			return nil, fmt.Errorf("--destination: %q has no port", text)
		}
		all = append(all, to)
	}
	return all, nil
}

// errSelftest says that a check has failed, which was printed.
var errSelftest = errors.New("the selftest has failed")

// tester is a selftest that runs.
type tester struct {
	*selftestOptions
	clients
	examiner Examiner
	// ask has a pod ask.
	ask      func(ctx context.Context, pod string, questions []selftest.Question) ([]selftest.Answer, error)
	template selftest.Template
	judge    selftest.Judge
	// pool is nil if Coil gives no addresses.
	addressing selftest.Addressing
	report     selftest.Report
	// coildPulls are the Secrets by which the image of coild is pulled.
	coildPulls []string
	ways       []selftest.Way
	waysLeft   []selftest.Check
	// made says that the namespace may be there.
	made bool
	// leftovers are the namespaces of earlier selftests that are still there.
	leftovers []string
	// cancel ends the selftest as an interrupt does, and lost is why its lines can't be written any more.
	cancel context.CancelFunc
	lost   error
	// walked are the pods that were examined.
	walked map[string][]string
}

func (o *selftestOptions) run(ctx context.Context) error {
	if err := o.validate(); err != nil {
		return err
	}
	s := &tester{selftestOptions: o, walked: map[string][]string{}, report: selftest.Report{Checks: []selftest.Check{}}}
	s.ask = s.answers
	var err error
	if s.clients, err = o.connect(); err != nil {
		return err
	}
	if s.examiner, err = (&whyOptions{tool: o.tool}).examiner(); err != nil {
		return err
	}
	ctx, s.cancel = context.WithCancel(ctx)
	defer s.cancel()
	// A reader that is gone is an error of the next line, which ends the selftest; SIGPIPE would leave all that it has made.
	signal.Ignore(syscall.SIGPIPE)
	defer signal.Reset(syscall.SIGPIPE)
	err = s.all(ctx)
	switch {
	case s.lost != nil:
		err = s.lost
	case ctx.Err() != nil && len(s.leftovers) > 0:
		err = fmt.Errorf("interrupted; kubectl delete namespace %s, or the next selftest, removes what is left of earlier ones", strings.Join(s.leftovers, " "))
	case ctx.Err() != nil:
		err = errors.New("interrupted")
	}
	err = errors.Join(err, s.finish(ctx))
	if s.lost != nil {
		return err
	}
	if e := s.show(); e != nil {
		return errors.Join(err, e)
	}
	if err == nil && s.report.Count(selftest.Wrong) > 0 {
		err = errSelftest
	}
	return err
}

// all does all checks.
func (s *tester) all(ctx context.Context) error {
	if err := s.removeLeftovers(ctx); err != nil {
		return err
	}
	nodes, err := s.prepare(ctx)
	if err != nil {
		return err
	}
	if err := s.makeNamespace(ctx); err != nil {
		return err
	}
	var pods []selftest.Pod // those that run
	made := 0
	for i, batch := range selftest.Batches(nodes, s.atOnce) {
		if i > 0 { // the first node has its pod from before
			if pods, err = s.keepOne(ctx, pods, batch[0]); err != nil {
				return err
			}
			batch = batch[1:]
		}
		wishes := selftest.Wishes(batch, made)
		if made += len(batch); len(nodes) == 1 {
			wishes = append(wishes, selftest.Wishes(batch, made)...)
		}
		started, err := s.start(ctx, wishes)
		if err != nil {
			return err
		}
		pods = append(pods, started...)
		if err := s.addresses(ctx, started); err != nil {
			return err
		}
		if err := s.routes(ctx, pods); err != nil {
			return err
		}
	}
	if err := s.tryWays(ctx, pods); err != nil {
		return err
	}
	return s.tryService(ctx, pods)
}

// routes tries whether pods reach each other.
func (s *tester) routes(ctx context.Context, pods []selftest.Pod) error {
	if len(pods) < 2 {
		s.say(ctx, selftest.Check{Check: selftest.CheckRoutes, Subject: "all", State: selftest.Skipped, Seen: "fewer than two pods run"})
		return ctx.Err()
	}
	var tries []try
	for _, p := range selftest.Pairs(len(pods), rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))) {
		from, to := pods[p.From], pods[p.To]
		tries = append(tries, try{from: from, questions: selftest.Questions(from, to, uint16(s.port), p.Ring), judge: func(answers []selftest.Answer, err error) []selftest.Check {
			asked := selftest.Asked{From: from, To: to, Port: uint16(s.port), Answers: answers, Err: err}
			checks := []selftest.Check{s.judge.Route(asked)}
			if p.Ring && checks[0].State == selftest.Right {
				checks = append(checks, s.judge.MTU(asked))
			}
			return checks
		}})
	}
	return s.try(ctx, tries)
}

// selftestMarks begin the line of a check, and colours are theirs.
var (
	selftestMarks   = map[selftest.State]string{selftest.Right: "ok", selftest.Wrong: "FAILED", selftest.Skipped: "-"}
	selftestColours = map[selftest.State]string{selftest.Right: "32", selftest.Wrong: "31;1", selftest.Skipped: "33"}
)

// say adds a check, and tells it at once.
func (s *tester) say(ctx context.Context, c selftest.Check) {
	if c.State == selftest.Wrong {
		c.Found = s.found(ctx, c)
	}
	s.report.Checks = append(s.report.Checks, c)
	mark := fmt.Sprintf("%-6s", selftestMarks[c.State])
	if s.coloured() && s.format == formatTable {
		mark = "\x1b[" + selftestColours[c.State] + "m" + mark + "\x1b[0m"
	}
	var b strings.Builder
	printf(&b, "%s  %-9s  %s: %s\n", own(mark), c.Check, c.Subject, c.Seen)
	for _, text := range c.Found {
		printf(&b, "%19s%s\n", "", text)
	}
	if c.Do != "" {
		printf(&b, "%19s-> %s\n", "", c.Do)
	}
	s.tell("%s", own(b.String()))
}

// show prints the whole report, or what it comes to.
func (s *tester) show() error {
	if s.format != formatTable {
		return s.print(s.report, nil, nil)
	}
	if len(s.report.Checks) == 0 {
		return nil
	}
	err := printf(s.Out, "%s succeeded, %d failed, %d skipped\n", plan.Count(s.report.Count(selftest.Right), "check has", "checks have"),
		s.report.Count(selftest.Wrong), s.report.Count(selftest.Skipped))
	return err
}

// mostWalks is how many pods are examined: what is wrong with many is mostly the same. Each walk may take walkWithin.
const (
	mostWalks  = 6
	walkWithin = 10 * time.Second
)

// found says what is wrong with the pods of a check, or with the Service, by the walks of coilctl why: they may be gone when somebody asks.
func (s *tester) found(ctx context.Context, c selftest.Check) (all []string) {
	if c.Check == selftest.CheckServices {
		return s.walk(ctx, "service", selftest.ServiceName, s.examiner.Service)
	}
	for _, name := range c.Pods {
		all = append(all, s.walk(ctx, "pod", name, s.examiner.Pod)...)
	}
	return all
}

// walk says what is wrong with one object.
func (s *tester) walk(ctx context.Context, kind, name string, why func(ctx context.Context, namespace, name string) (diagnosis.Diagnosis, error)) []string {
	command := fmt.Sprintf("coilctl why %s %s/%s", kind, s.template.Namespace, name)
	if texts, known := s.walked[command]; known || len(s.walked) >= mostWalks || ctx.Err() != nil {
		return texts
	}
	ctx, cancel := context.WithTimeout(ctx, walkWithin)
	defer cancel()
	var texts []string
	if d, err := why(ctx, s.template.Namespace, name); err == nil {
		for _, step := range d.Steps {
			if step.State == diagnosis.Wrong {
				texts = append(texts, fmt.Sprintf("%s: %s: %s", command, step.Step, step.Seen))
			}
		}
	}
	s.walked[command] = texts
	return texts
}
