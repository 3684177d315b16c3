// Package migrator composes coil-migrator.
//
// It owns the commands and their flags. It must not know what a step of a migration does.
package migrator

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/coil-net/coil/generated/clientset/versioned"
	"github.com/coil-net/coil/pkg/app/program"
	"github.com/coil-net/coil/pkg/atomicfile"
	"github.com/coil-net/coil/pkg/etcd"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/migrate"
	"github.com/coil-net/coil/pkg/plan/coilv1"
)

const name = "coil-migrator"

// command is what the first argument asks for.
type command interface {
	program.Options
	run(context.Context) error
}

// Main does what args ask for, and returns the exit code of the process, as program.Main does.
func Main(args []string) int {
	commands := map[string]command{"dump": &dump{}, "replace": &replace{}}
	if len(args) > 0 {
		if args[0] == "preflight" {
			return preflightMain(args[1:])
		}
		if c, ok := commands[args[0]]; ok {
			return program.Main(name+" "+args[0], args[1:], c, c.run)
		}
		if slices.Contains(args, "--version") {
			fmt.Println(name, program.Version())
			return 0
		}
	}
	if len(args) > 0 {
		if slices.Contains([]string{"help", "--help", "-h"}, args[0]) {
			fmt.Fprint(os.Stderr, usage)
			return 0
		}
		fmt.Fprintf(os.Stderr, "%s: unknown command %q: the command comes first\n\n", name, args[0])
	}
	fmt.Fprint(os.Stderr, usage)
	return 2
}

const usage = `coil-migrator moves a cluster from Coil v1 to this version, and looks at one before Coil is installed or updated.

  coil-migrator preflight  say what an installation or an update will do, and what stands against it
  coil-migrator dump       end Coil v1, and write AddressPools and AddressBlocks in the place of its data
  coil-migrator replace    exchange the pods of Coil v1 for pods with addresses of this Coil

Each command has --help. All can be run again at any time after they were interrupted.
`

// access are the flags that both commands have.
type access struct{ Kubeconfig string }

func (a *access) addFlags(fs *pflag.FlagSet) {
	fs.StringVar(&a.Kubeconfig, "kubeconfig", "", "kubeconfig file; by default that of kubectl")
}

// config is the configuration of clients: from where kubectl has it, or from the pod that the program runs in.
func (a *access) config() (*rest.Config, error) {
	file := a.Kubeconfig
	if file == "" {
		rules := clientcmd.NewDefaultClientConfigLoadingRules()
		if i := slices.IndexFunc(rules.Precedence, exists); i >= 0 {
			cfg, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, nil).ClientConfig()
			if err == nil {
				cfg.UserAgent = name
			}
			return cfg, err
		}
	}
	return kube.Config(file, name)
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// cluster connects to the cluster.
func (a *access) cluster() (migrate.Cluster, error) {
	cfg, err := a.config()
	if err != nil {
		return migrate.Cluster{}, err
	}
	core, errKube := kubernetes.NewForConfig(cfg)
	coil, errCoil := versioned.NewForConfig(cfg)
	return migrate.Cluster{Kube: core, Coil: coil, Log: os.Stderr}, errors.Join(errKube, errCoil)
}

// dump is the command dump.
type dump struct {
	access
	Etcd          etcd.Options
	Prefix        string
	Output        string
	SkipUninstall bool
	DryRun        bool
	Timeout       time.Duration // of the wait for the end of Coil v1's pods
}

// passwordEnv has the password of etcd's user, which in a flag all users of the machine could see.
const passwordEnv = "COIL_ETCD_PASSWORD"

// AddFlags implements program.Options.
func (d *dump) AddFlags(fs *pflag.FlagSet) {
	d.addFlags(fs)
	fs.StringSliceVar(&d.Etcd.Endpoints, "etcd-endpoints", []string{"http://127.0.0.1:2379"}, "etcd's endpoints, separated by commas")
	fs.StringVar(&d.Prefix, "etcd-prefix", "/coil/", "beginning of Coil v1's keys in etcd")
	fs.DurationVar(&d.Etcd.Timeout, "etcd-timeout", 10*time.Second, "of etcd's connection, and of each request")
	fs.StringVar(&d.Etcd.Username, "etcd-username", "", "user of etcd")
	fs.StringVar(&d.Etcd.Password, "etcd-password", "", "password of etcd's user; other users of the machine can't see it in the environment variable "+passwordEnv)
	fs.StringVar(&d.Etcd.CA, "etcd-tls-ca", "", "file with the certificates of authorities that etcd's certificate is checked with")
	fs.StringVar(&d.Etcd.Cert, "etcd-tls-cert", "", "file with the client's certificate for etcd")
	fs.StringVar(&d.Etcd.Key, "etcd-tls-key", "", "file with the key of the client's certificate")
	fs.StringVar(&d.Output, "output", "", "file for the YAML; by default standard output")
	fs.BoolVar(&d.SkipUninstall, "skip-uninstall", false, "leave Coil v1's objects alone; its pods must have ended")
	fs.BoolVar(&d.DryRun, "dry-run", false, "change nothing, and print what would be done")
	fs.DurationVar(&d.Timeout, "timeout", 5*time.Minute, "of the wait for the end of Coil v1's pods")
}

// Validate implements program.Options.
func (d *dump) Validate() error {
	if d.Etcd.Password == "" && d.Etcd.Username != "" {
		d.Etcd.Password = os.Getenv(passwordEnv)
	}
	var errs []error
	if err := d.Etcd.Validate(); err != nil {
		for problem := range strings.Lines(err.Error()) {
			errs = append(errs, fmt.Errorf("--etcd-*: %s", strings.TrimSpace(problem)))
		}
	}
	if d.Prefix == "" {
		errs = append(errs, errors.New("--etcd-prefix is empty: Coil v1's own is /coil/"))
	}
	if d.Timeout <= 0 {
		errs = append(errs, fmt.Errorf("--timeout %v isn't positive", d.Timeout))
	}
	return errors.Join(errs...)
}

func (d *dump) run(ctx context.Context) error {
	c, err := d.cluster()
	if err != nil {
		return fmt.Errorf("nothing was changed: %w", err)
	}
	return (&migrate.Dump{
		Cluster: c, Read: d.read, Check: d.check, Write: d.write,
		SkipUninstall: d.SkipUninstall, DryRun: d.DryRun, Timeout: d.Timeout,
	}).Run(ctx)
}

// read reads Coil v1's data.
func (d *dump) read(ctx context.Context) ([]coilv1.Entry, int64, error) {
	kvs, revision, err := etcd.Read(ctx, d.Etcd, d.Prefix)
	if errors.Is(err, etcd.ErrNoCertificate) {
		err = fmt.Errorf("%w: give --etcd-tls-cert and --etcd-tls-key", err)
	}
	var entries []coilv1.Entry
	for _, kv := range kvs {
		entries = append(entries, coilv1.Entry{Key: strings.TrimPrefix(kv.Key, d.Prefix), Value: kv.Value})
	}
	return entries, revision, err
}

// check returns why the YAML can't be written where it is wanted.
func (d *dump) check() error {
	if d.Output == "" {
		return nil
	}
	path, err := filepath.Abs(d.Output)
	if err != nil {
		return err
	}
	return atomicfile.Check(path)
}

// write puts the YAML where it is wanted. A file is whole or not there.
func (d *dump) write(text []byte) error {
	if d.Output == "" || d.DryRun {
		_, err := os.Stdout.Write(text)
		return err
	}
	path, err := filepath.Abs(d.Output)
	if err != nil {
		return err
	}
	return atomicfile.Write(path, text, 0o644)
}

// replace is the command replace.
type replace struct {
	access
	Namespace, DaemonSet string
	Interval             time.Duration
	Force, DryRun        bool
}

// AddFlags implements program.Options.
func (r *replace) AddFlags(fs *pflag.FlagSet) {
	r.addFlags(fs)
	fs.StringVar(&r.Namespace, "namespace", "kube-system", "namespace of coild")
	fs.StringVar(&r.DaemonSet, "daemonset", "coild", "DaemonSet of coild")
	fs.DurationVar(&r.Interval, "interval", 10*time.Second, "pause between two evictions")
	fs.BoolVar(&r.Force, "force", false, "evict also pods that nobody makes again, since they have no controller")
	fs.BoolVar(&r.DryRun, "dry-run", false, "change nothing, and print what would be done")
}

// Validate implements program.Options.
func (r *replace) Validate() error {
	return errors.Join(
		program.NotNegative("--interval", r.Interval),
		objectName("--namespace", r.Namespace, validation.IsDNS1123Label),
		objectName("--daemonset", r.DaemonSet, validation.IsDNS1123Subdomain),
	)
}

// objectName returns an error unless the value of a flag can be the name of an object, of which check returns what is wrong.
func objectName(flag, value string, check func(string) []string) error {
	if problems := check(value); len(problems) > 0 {
		return fmt.Errorf("%s=%q can't be the name of an object: %s", flag, value, strings.Join(problems, "; "))
	}
	return nil
}

// grace is how long a pod may take to end besides its own grace period: the kubelet has to stop its containers.
const grace = time.Minute

func (r *replace) run(ctx context.Context) error {
	c, err := r.cluster()
	if err != nil {
		return fmt.Errorf("nothing was changed: %w", err)
	}
	return (&migrate.Replace{
		Cluster: c, Namespace: r.Namespace, DaemonSet: r.DaemonSet,
		Interval: r.Interval, Grace: grace, Force: r.Force, DryRun: r.DryRun,
	}).Run(ctx)
}
