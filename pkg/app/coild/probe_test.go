package coild

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/plan/probe"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/store/sqlite"
	"github.com/coil-net/coil/pkg/testkit"
)

// TestProbe looks at folders as a node may have them.
func TestProbe(t *testing.T) {
	var uts unix.Utsname
	testkit.Check(t, unix.Uname(&uts))
	kernel := unix.ByteSliceToString(uts.Release[:])
	allModules := slices.Concat(nodeModules, fouModules, egressModules)
	present, err := os.ReadFile("/proc/modules")
	if err != nil && !errors.Is(err, os.ErrNotExist) { // a kernel without modules has no such list
		t.Fatal(err)
	}
	unloaded := func(names ...string) []string {
		return slices.DeleteFunc(slices.Clone(names), func(n string) bool {
			return strings.HasPrefix(string(present), n+" ") || strings.Contains(string(present), "\n"+n+" ")
		})
	}
	list := func(names []string) (text string) {
		for _, n := range names {
			text += "kernel/net/" + n + ".ko.xz:\n"
		}
		return text
	}
	write := func(path, content string) {
		testkit.Check(t, os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o600))
	}
	for _, tt := range []struct {
		name  string
		setup func(o *probeOptions)
		want  probe.Result
	}{
		{"a node with everything", func(o *probeOptions) {
			write(filepath.Join(o.ModuleDir, kernel, "modules.builtin"), "kernel/net/netfilter/nf_tables.ko\n")
			write(filepath.Join(o.ModuleDir, kernel, "modules.dep"), list(allModules[1:]))
			write(filepath.Join(o.CNIConfDir, "10-coil.conflist"), `{"plugins": [{"type": "coil"}]}`)
			s, _, err := sqlite.Open(t.Context(), sqlite.Options{
				Path: filepath.Join(o.StateDir, "coild.db"), Identity: store.Identity{NodeName: "n"}, BootID: "b",
			})
			testkit.Check(t, err)
			testkit.Check(t, s.Close())
		}, probe.Result{
			CNI:    []probe.CNIFile{{Name: "10-coil.conflist", Plugins: []string{"coil"}}},
			Record: &probe.Record{Version: 2, Known: 2},
		}},
		{"a node without folders", func(*probeOptions) {}, probe.Result{
			ModulesUnlisted: len(unloaded(allModules...)) > 0, MissingModules: unloaded(nodeModules...),
			MissingEgressModules: unloaded(slices.Concat(fouModules, egressModules)...),
		}},
		{"modules of another kernel", func(o *probeOptions) {
			write(filepath.Join(o.ModuleDir, kernel+"-old", "modules.dep"), list(allModules))
		}, probe.Result{
			ModulesUnlisted: len(unloaded(allModules...)) > 0, MissingModules: unloaded(nodeModules...),
			MissingEgressModules: unloaded(slices.Concat(fouModules, egressModules)...),
		}},
		{"a kernel without FoU, and a record of another program", func(o *probeOptions) {
			write(filepath.Join(o.ModuleDir, kernel, "modules.dep"), list(slices.Concat(nodeModules, egressModules)))
			write(filepath.Join(o.StateDir, "coild.db"), "mine")
		}, probe.Result{MissingEgressModules: unloaded(fouModules...), Record: &probe.Record{Known: 2, Damaged: true}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			o := &probeOptions{ModuleDir: filepath.Join(dir, "lib"), CNIConfDir: filepath.Join(dir, "cni"), StateDir: filepath.Join(dir, "state")}
			tt.setup(o)
			tt.want.Kernel = kernel
			if diff := cmp.Diff(tt.want, testkit.Must(o.look())(t), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("result (-want +got):\n%s", diff)
			}
		})
	}
}

// What can't be read is told, and isn't taken for what isn't there.
func TestProbeOfUnreadableFolders(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	testkit.Check(t, os.WriteFile(file, nil, 0o600))
	o := &probeOptions{ModuleDir: file, CNIConfDir: file, StateDir: file}
	r := testkit.Must(o.look())(t)
	if len(r.Problems) < 2 || r.CNI != nil || r.Record != nil {
		t.Errorf("result %+v, want problems with both folders", r)
	}
}

func TestProbeFlags(t *testing.T) {
	o := &probeOptions{}
	fs := pflag.NewFlagSet("coild probe", pflag.ContinueOnError)
	o.AddFlags(fs)
	testkit.Check(t, fs.Parse(nil), o.Validate())
	want := probeOptions{ModuleDir: "/host/lib/modules", CNIConfDir: "/host/etc/cni/net.d", StateDir: "/host/var/lib/coil"}
	if *o != want {
		t.Errorf("defaults %+v, want %+v", *o, want)
	}
	testkit.Check(t, fs.Parse([]string{"--module-dir=a", "--cni-conf-dir=/b", "--state-dir=/c"}))
	if err := o.Validate(); err == nil {
		t.Error("a relative folder is no error")
	}
}
