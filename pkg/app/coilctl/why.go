package coilctl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/coil-net/coil/pkg/plan/diagnosis"
	"github.com/coil-net/coil/pkg/plan/preflight"
)

// whyOptions are the flags of the command why.
type whyOptions struct {
	*tool
	timeout time.Duration
}

// errWrong says that a step is wrong, which was printed.
var errWrong = errors.New("something is wrong")

// rightsOfWhy are named by the help of all commands below why.
const rightsOfWhy = "It asks the coild of the node by running \"coild debug\" in its pod, which needs the rights to get and create pods/exec in coild's namespace: who has these can do " +
	"anything on the nodes. Likewise it asks the routers of Egresses that a pod uses, in their namespaces. Without them the walk says what the objects tell, and what isn't known. The exit code is 1 if a step is wrong."

// why returns the command that says what is wrong with one thing.
func (t *tool) why() *cobra.Command {
	o := &whyOptions{tool: t}
	c := &cobra.Command{
		Use: "why", Short: "Tell what is right and wrong with one pod, address, node or Service, and what to do",
		Long: "Tell, step by step, what is right and wrong with one pod, address, node or Service, from the objects of the API server to what its node has in the kernel, and what to do.",
		Args: cobra.NoArgs, RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.PersistentFlags().DurationVar(&o.timeout, "timeout", 10*time.Second, "the longest time for all that is read and asked")
	c.AddCommand(o.whyPod(), o.whyAddress(), o.whyNode(), o.whyService())
	return c
}

func (o *whyOptions) whyPod() *cobra.Command {
	return &cobra.Command{
		Use: "pod [NAMESPACE/]NAME", Short: "Tell why a pod has no network, or which part of it is wrong", Args: exactly(1),
		Long: "Tell why a pod has no network, or which part of it is wrong: the pod and its node, the namespace's pool, BlockRequests, the block, the record of the address, the link, " +
			"rules, routes, the source guard, kernel parameters, exported routes, and what it uses Egresses for.\n\n" +
			"It needs the rights to get pods, namespaces and nodes, to list pods and events, and to get and list all kinds of coil.cybozu.com. " + rightsOfWhy,
		Example: "  coilctl why pod shop/cart-0\n  coilctl why pod cart-0 --namespace=shop -o json",
		RunE: func(c *cobra.Command, args []string) error {
			namespace, name, err := o.nameOf("pod", args[0])
			if err != nil {
				return err
			}
			return o.run(c.Context(), func(ctx context.Context, e Examiner) (diagnosis.Diagnosis, error) { return e.Pod(ctx, namespace, name) })
		},
	}
}

func (o *whyOptions) whyAddress() *cobra.Command {
	return &cobra.Command{
		Use: "address ADDRESS", Short: "Tell who has an address, and whether it leads there", Args: exactly(1),
		Long: "Tell who has an address: its pool, its block, the node of the block, the pod that has the address by the record of the node, and what the kernel has for that pod; or the Services that are reached by it. It may be a floating IP of OpenStack.\n\n" +
			"It needs the rights to get nodes, to list pods, and to list addresspools and addressblocks of coil.cybozu.com; of an address of no pool also addressclaims; of an address of Services also those of \"why service\". " + rightsOfWhy,
		Example: "  coilctl why address 10.100.0.225",
		RunE: func(c *cobra.Command, args []string) error {
			a, err := netip.ParseAddr(args[0])
			if err != nil {
				return fmt.Errorf("%q isn't an IP address", args[0])
			}
			a = a.Unmap().WithZone("")
			return o.run(c.Context(), func(ctx context.Context, e Examiner) (diagnosis.Diagnosis, error) { return e.Address(ctx, a), nil })
		},
	}
}

func (o *whyOptions) whyNode() *cobra.Command {
	return &cobra.Command{
		Use: "node NAME", Short: "Tell what is wrong with a node, for all of its pods", Args: exactly(1),
		Long: "Tell what is wrong with a node: its coild, BlockRequests, blocks, what its pods have in the kernel, and what they share.\n\n" +
			"It needs the rights to get nodes, to list pods, and to list addressblocks and blockrequests of coil.cybozu.com. " + rightsOfWhy,
		Example: "  coilctl why node worker-1",
		RunE: func(c *cobra.Command, args []string) error {
			return o.run(c.Context(), func(ctx context.Context, e Examiner) (diagnosis.Diagnosis, error) { return e.Node(ctx, args[0]), nil })
		},
	}
}

func (o *whyOptions) whyService() *cobra.Command {
	return &cobra.Command{
		Use: "service [NAMESPACE/]NAME", Short: "Tell why a Service of the type LoadBalancer has no address, or isn't reached by its address", Args: exactly(1),
		Long: "Tell why a Service of the type LoadBalancer has no address, or isn't reached by its address: what it asks for, the controllers' leaders, the pool, what OpenStack provides, the AddressClaim, " +
			"the Service's status, the node or the gateways that have the address, endpoints, and which clients are let in.\n\n" + rightsOfWhyService + ". " + rightsOfWhy,
		Example:           "  coilctl why service shop/web\n  coilctl why service web --namespace=shop -o json",
		ValidArgsFunction: o.completeService,
		RunE: func(c *cobra.Command, args []string) error {
			namespace, name, err := o.nameOf("Service", args[0])
			if err != nil {
				return err
			}
			return o.run(c.Context(), func(ctx context.Context, e Examiner) (diagnosis.Diagnosis, error) {
				return e.Service(ctx, namespace, name)
			})
		},
	}
}

// rightsOfWhyService are those of a walk about a Service.
const rightsOfWhyService = "It needs the rights to get services and nodes, to list pods and nodes, to list endpointslices of discovery.k8s.io, to get leases of coordination.k8s.io in the namespace " +
	preflight.Namespace + ", and to list addresspools, addressblocks, addressclaims and loadbalancergateways of coil.cybozu.com"

// nameOf splits the name of an object. Without a namespace it is of that of the flags, or of the kubeconfig.
func (o *whyOptions) nameOf(kind, text string) (namespace, name string, err error) {
	namespace, name, ok := strings.Cut(text, "/")
	if !ok {
		name = text
		namespace, _, err = o.flags.ToRawKubeConfigLoader().Namespace()
	}
	if err == nil && (name == "" || namespace == "" || strings.Contains(name, "/")) {
		err = fmt.Errorf("%q isn't [NAMESPACE/]NAME of a %s", text, kind)
	}
	return namespace, name, err
}

// examiner reads with the operator's rights.
func (o *whyOptions) examiner() (Examiner, error) {
	core, err := o.core()
	if err != nil {
		return Examiner{}, err
	}
	client, err := o.coil()
	// The programs of nodes are asked first, then those of routers.
	return Examiner{Core: core, Coil: client, Ask: o.ask, AskRouter: o.askRouter, Within: o.timeout * 2 / 5, Ahead: o.clock.off}, err
}

// run walks, and prints what was found.
func (o *whyOptions) run(ctx context.Context, walk func(context.Context, Examiner) (diagnosis.Diagnosis, error)) error {
	e, err := o.examiner()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	d, err := walk(ctx, e)
	if err != nil {
		return err
	}
	if err := o.show(d); err != nil {
		return err
	}
	if len(d.Wrong()) > 0 {
		return errWrong
	}
	return nil
}

// marks begin the line of a step, and colours are theirs.
var (
	marks    = map[diagnosis.State]string{diagnosis.Right: "ok", diagnosis.Wrong: "WRONG", diagnosis.Unknown: "?"}
	colourOf = map[diagnosis.State]string{diagnosis.Right: "32", diagnosis.Wrong: "31;1", diagnosis.Unknown: "33"}
)

// show prints a walk.
func (o *whyOptions) show(d diagnosis.Diagnosis) error {
	if o.format != formatTable {
		return o.print(d, nil, nil)
	}
	var b strings.Builder
	printf(&b, "%s\n", d.Subject)
	for _, s := range d.Steps {
		mark := fmt.Sprintf("%-5s", marks[s.State])
		if o.coloured() {
			mark = "\x1b[" + colourOf[s.State] + "m" + mark + "\x1b[0m"
		}
		printf(&b, "%s  %-9s  %s\n", own(mark), s.Step, s.Seen)
		if s.Do != "" {
			printf(&b, "%18s-> %s\n", "", s.Do)
		}
	}
	_, err := io.WriteString(o.Out, b.String())
	return err
}
