package migrator

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"

	"github.com/coil-net/coil/generated/clientset/versioned"
	"github.com/coil-net/coil/pkg/app/program"
	"github.com/coil-net/coil/pkg/cniconf"
	"github.com/coil-net/coil/pkg/migrate/survey"
	"github.com/coil-net/coil/pkg/plan/preflight"
)

// preflightCommand is the command preflight.
type preflightCommand struct {
	access
	Variant     string
	CNIConfName string
	Image       string
	Namespace   string
	SkipNodes   bool
	Timeout     time.Duration // for each node

	worst preflight.Severity
}

// preflightMain runs the command preflight, and returns the exit code: that of program.Main, 1 also if something couldn't
// be found out, and 3 if something stands against the installation.
func preflightMain(args []string) int {
	var p preflightCommand
	code := program.Main(name+" preflight", args, &p, p.run)
	switch {
	case code != 0:
		return code
	case p.worst == preflight.Blocker:
		return 3
	case p.worst == preflight.Unknown:
		return 1
	}
	return 0
}

// AddFlags implements program.Options.
func (p *preflightCommand) AddFlags(fs *pflag.FlagSet) {
	p.addFlags(fs)
	fs.StringVar(&p.Variant, "variant", "", "folder of manifests/variants that is to be installed; by default manifests itself")
	fs.StringVar(&p.CNIConfName, "cni-conf-name", cniconf.DefaultName, "name that Coil's network configuration will have on nodes")
	fs.StringVar(&p.Image, "image", "", "image of the Coil that is to be installed; a pod on each node looks at it")
	fs.StringVar(&p.Namespace, "namespace", preflight.Namespace, "namespace of these pods")
	fs.BoolVar(&p.SkipNodes, "skip-nodes", false, "make no pods: kernels, network configurations and records of nodes aren't looked at")
	fs.DurationVar(&p.Timeout, "timeout", 2*time.Minute, "for the pod of each node, the pull of the image included")
}

// Validate implements program.Options.
func (p *preflightCommand) Validate() error {
	var errs []error
	if !slices.Contains(preflight.Variants, preflight.Variant(p.Variant)) {
		errs = append(errs, fmt.Errorf("--variant=%s is none of those in manifests/variants: %q", p.Variant, preflight.Variants[1:]))
	}
	if p.Image == "" && !p.SkipNodes {
		errs = append(errs, errors.New("--image is empty: give the image that is to be installed, or --skip-nodes"))
	}
	if err := cniconf.CheckName(p.CNIConfName); err != nil {
		errs = append(errs, fmt.Errorf("--cni-conf-name: %w", err))
	}
	if p.Image != "" && !imageName.MatchString(p.Image) {
		errs = append(errs, fmt.Errorf("--image=%q can't be the name of an image", p.Image))
	}
	return errors.Join(append(errs, objectName("--namespace", p.Namespace, validation.IsDNS1123Label), program.Positive("--timeout", p.Timeout))...)
}

// imageName matches a registry with a port, a path, a tag and a digest, of which only the path is needed, as container
// runtimes do it (github.com/distribution/reference).
var imageName = regexp.MustCompile(`^(([a-zA-Z0-9][a-zA-Z0-9.-]*|\[[0-9a-fA-F:]+\])(:[0-9]+)?/)?` +
	`[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*(/[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*)*` +
	`(:\w[\w.-]{0,127})?(@[a-zA-Z][a-zA-Z0-9+._-]*:[0-9a-fA-F]{32,})?$`)

func (p *preflightCommand) run(ctx context.Context) error {
	cfg, err := p.config()
	if err != nil {
		return err
	}
	core, errKube := kubernetes.NewForConfig(cfg)
	coil, errCoil := versioned.NewForConfig(cfg)
	kinds, errDynamic := dynamic.NewForConfig(cfg)
	if err := errors.Join(errKube, errCoil, errDynamic); err != nil {
		return err
	}
	cluster, err := survey.Read(ctx, survey.Clients{Kube: core, Coil: coil, Dynamic: kinds})
	if err != nil {
		return err
	}
	cluster.Variant, cluster.This, cluster.Image, cluster.ConfName = preflight.Variant(p.Variant), program.Version(), p.Image, p.CNIConfName
	if !p.SkipNodes {
		cluster.Probes = survey.Probes{Pods: core.CoreV1().Pods(p.Namespace), Image: p.Image, Timeout: p.Timeout}.Run(ctx, cluster.Nodes)
	}
	if err := context.Cause(ctx); err != nil {
		return err
	}
	report := preflight.Judge(cluster)
	p.worst = report.Worst()
	_, err = fmt.Fprint(os.Stdout, report)
	return err
}
