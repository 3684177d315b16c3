package coilctl

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/validation"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/convert"
)

// noCounterpart is the exit code if something of the input has no counterpart.
const noCounterpart = 3

// convertOptions are the flags of the command convert.
type convertOptions struct {
	*tool
	files     []string
	recursive bool
	format    string
	egress    string
	onFailure string
	strict    bool
}

// convert returns the command that makes Coil's objects of those of other egress systems.
func (t *tool) convert() *cobra.Command {
	o := &convertOptions{tool: t}
	c := &cobra.Command{
		Use: "convert -f FILE", Short: "Make objects of Coil of those of other egress systems", Args: cobra.NoArgs,
		Long: "Make objects of Coil of those of EgressGateway (egressgateway.spidernet.io/v1beta1) and kube-static-egress-ip (staticegressips.nirmata.io/v1alpha1).\n\n" +
			"The objects are written to the standard output. What has no counterpart, what Coil does in another way and what is left to do is written to the standard error as notes, below the names of the objects that they are about. " +
			"The exit code is 3 if something has no counterpart, and 1 after an error.\n\n" +
			"It reads only the files, and needs no cluster.",
		Example: "  kubectl get egressgateways,egresspolicies,egressclusterpolicies,egressclusterinfos -A -o yaml | coilctl convert -f - > coil.yaml\n" +
			"  kubectl get staticegressips -A -o yaml | coilctl convert -f - --egress-namespace=internet > coil.yaml\n" +
			"  coilctl convert -f gateways/ -R -f policies.yaml --strict",
		RunE: func(*cobra.Command, []string) error { return o.run() },
	}
	c.Flags().StringArrayVarP(&o.files, "filename", "f", nil, "file, or folder whose .yaml, .yml and .json files are read; - for the standard input")
	c.Flags().BoolVarP(&o.recursive, "recursive", "R", false, "read the folders below a folder, too")
	c.Flags().StringVarP(&o.format, "output", "o", formatYAML, "format of the output: yaml, json")
	c.Flags().StringVar(&o.egress, "egress-namespace", "egress", "namespace of the Egresses, which has to exist")
	c.Flags().StringVar(&o.onFailure, "on-failure", "", "spec.onFailure of all policies: Node lets packets that no router can forward leave as those of other pods do, as the other systems do; Closed drops them, and is the default of the API")
	c.Flags().BoolVar(&o.strict, "strict", false, "write nothing, and fail, if there is any note")
	complete(c, "output", fixed([]string{formatYAML, formatJSON}))
	complete(c, "on-failure", fixed([]string{string(v2.EgressFailureClosed), string(v2.EgressFailureNode)}))
	return c
}

func (o *convertOptions) validate() error {
	var errs []error
	if len(o.files) == 0 {
		errs = append(errs, errors.New("-f is required: a file, a folder, or - for the standard input"))
	}
	if o.format != formatYAML && o.format != formatJSON {
		errs = append(errs, fmt.Errorf("--output can't be %q: choose yaml or json", o.format))
	}
	if bad := validation.IsDNS1123Label(o.egress); len(bad) > 0 {
		errs = append(errs, fmt.Errorf("--egress-namespace can't be %q: %s", o.egress, strings.Join(bad, ", ")))
	}
	switch v2.EgressFailure(o.onFailure) {
	case "", v2.EgressFailureClosed, v2.EgressFailureNode:
	default:
		errs = append(errs, fmt.Errorf("--on-failure can't be %q: choose Closed or Node", o.onFailure))
	}
	return errors.Join(errs...)
}

func (o *convertOptions) run() error {
	if err := o.validate(); err != nil {
		return err
	}
	in := convert.Input{Namespace: *o.flags.Namespace}
	for _, f := range o.files {
		if err := o.read(&in, f); err != nil {
			return err
		}
	}
	for _, kind := range in.Ignored() {
		printf(o.ErrOut, "ignored: %s\n", kind)
	}
	if in.Known() == 0 {
		return errors.New("the input has nothing of egressgateway.spidernet.io nor of staticegressips.nirmata.io to convert")
	}
	result, err := convert.Convert(in, convert.Options{EgressNamespace: o.egress, OnFailure: v2.EgressFailure(o.onFailure)})
	if err != nil {
		return err
	}
	if err := printf(o.ErrOut, "%s", eachLine(result.Text())); err != nil {
		return err
	}
	if n := len(result.Notes); o.strict && n > 0 {
		return fmt.Errorf("nothing is written, since --strict is set and notes were told: %d", n)
	}
	write := result.YAML
	if o.format == formatJSON {
		write = result.JSON
	}
	text, err := write()
	if err != nil {
		return err
	}
	if _, err := o.Out.Write(text); err != nil {
		return err
	}
	if n := result.Lost(); n > 0 {
		return exitError{fmt.Errorf("values without a counterpart: %d", n), noCounterpart}
	}
	return nil
}

// read adds a file, the files of a folder, or the standard input, as kubectl chooses them: a file that is named may have any name, and links to folders below a folder aren't followed.
func (o *convertOptions) read(in *convert.Input, name string) error {
	if name == "-" {
		text, err := io.ReadAll(o.In)
		if err != nil {
			return fmt.Errorf("read the standard input: %w", err)
		}
		return in.Read("standard input", text)
	}
	i, err := os.Stat(name)
	if err != nil {
		return err
	}
	root := name
	if i.IsDir() {
		root += string(filepath.Separator) // otherwise a link to a folder isn't followed
	}
	return filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case e.IsDir() && path != root && !o.recursive:
			return fs.SkipDir
		case e.IsDir(), path != root && !slices.Contains([]string{".yaml", ".yml", ".json"}, filepath.Ext(path)):
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return in.Read(path, text)
	})
}
