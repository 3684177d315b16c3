package installer_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2/ktesting"

	"github.com/coil-net/coil/pkg/app/installer"
	"github.com/coil-net/coil/pkg/cniconf"
	"github.com/coil-net/coil/pkg/testkit"
)

const (
	conflist = `{"cniVersion":"1.1.0","name":"k8s-pod-network","plugins":[{"type":"coil","socket":"/run/coild.sock"}]}`
	oldList  = `{"cniVersion":"0.4.0","name":"k8s-pod-network","plugins":[{"type":"coil","socket":"/run/coild.sock"}]}`
)

// node is a host's folders and what would be installed.
func node(t *testing.T) *installer.Options {
	t.Helper()
	dir := t.TempDir()
	o := &installer.Options{
		ConfName: cniconf.DefaultName, EtcDir: filepath.Join(dir, "etc/cni/net.d"), BinDir: filepath.Join(dir, "opt/cni/bin"),
		CoilPath: filepath.Join(dir, "coil"), NetConf: conflist,
	}
	copyFile(t, "/bin/true", o.CoilPath)
	return o
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	content, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(to, content, 0o644); err != nil {
		t.Fatal(err)
	}
}

func mustRun(t *testing.T, o *installer.Options) {
	t.Helper()
	if err := o.Validate(); err != nil {
		t.Fatal(err)
	}
	if err := run(t, o); err != nil {
		t.Fatal(err)
	}
}

func run(t *testing.T, o *installer.Options) error {
	t.Helper()
	_, ctx := ktesting.NewTestContext(t)
	return installer.Run(ctx, o)
}

func TestInstallOnAFreshNode(t *testing.T) {
	o := node(t)
	mustRun(t, o)
	if err := exec.Command(filepath.Join(o.BinDir, "coil")).Run(); err != nil {
		t.Errorf("installed plugin can't be run: %v", err)
	}
	staged, err := os.ReadFile(filepath.Join(o.EtcDir, o.ConfName+".staged"))
	if err != nil || string(staged) != conflist {
		t.Errorf("staged %q, %v", staged, err)
	}
	if diff := cmp.Diff([]string{o.ConfName + ".staged"}, testkit.FilesIn(t, o.EtcDir)); diff != "" {
		t.Errorf("configurations (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"coil"}, testkit.FilesIn(t, o.BinDir)); diff != "" {
		t.Errorf("plugins (-want +got):\n%s", diff)
	}
}

func TestInstallOnlyThePlugin(t *testing.T) {
	o := node(t)
	o.NetConf = installer.NoNetConf
	mustRun(t, o)
	if diff := cmp.Diff([]string{"coil"}, testkit.FilesIn(t, o.BinDir)); diff != "" {
		t.Errorf("plugins (-want +got):\n%s", diff)
	}
	if got := testkit.FilesIn(t, o.EtcDir); len(got) > 0 {
		t.Errorf("configurations %q, want none", got)
	}
}

func TestSecondRunChangesNothing(t *testing.T) {
	o := node(t)
	mustRun(t, o)
	files := []string{filepath.Join(o.BinDir, "coil"), filepath.Join(o.EtcDir, o.ConfName+".staged")}
	var before []os.FileInfo
	for _, f := range files {
		info, err := os.Stat(f)
		if err != nil {
			t.Fatal(err)
		}
		before = append(before, info)
	}
	mustRun(t, o)
	for i, f := range files {
		info, err := os.Stat(f)
		if err != nil {
			t.Fatal(err)
		}
		if !os.SameFile(before[i], info) || info.ModTime() != before[i].ModTime() {
			t.Errorf("%s was written again", f)
		}
	}
}

// An update keeps the configuration in use and the files of others, and replaces the
// plugin even while it runs or when somebody broke it.
func TestUpdate(t *testing.T) {
	o := node(t)
	copyFile(t, "/bin/sleep", o.CoilPath)
	o.NetConf = oldList
	mustRun(t, o)
	if _, err := (&cniconf.Keeper{Dir: o.EtcDir, Name: o.ConfName}).Activate(); err != nil {
		t.Fatal(err)
	}
	others := map[string]string{filepath.Join(o.EtcDir, "20-other.conflist"): "other", filepath.Join(o.BinDir, "bridge"): "bridge"}
	for f, content := range others {
		if err := os.WriteFile(f, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	running := exec.CommandContext(ctx, filepath.Join(o.BinDir, "coil"), "3600")
	if err := running.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { cancel(); running.Wait() }()

	copyFile(t, "/bin/true", o.CoilPath)
	o.NetConf = conflist
	for _, tt := range []struct {
		name string
		harm func(string) error
	}{
		{"while it runs", func(string) error { return nil }},
		{"not executable", func(p string) error { return os.Chmod(p, 0o600) }},
		{"emptied", func(p string) error { return os.Truncate(p, 0) }},
		{"a link", func(p string) error { return errors.Join(os.Remove(p), os.Symlink("/bin/sleep", p)) }},
		{"a dangling link", func(p string) error { return errors.Join(os.Remove(p), os.Symlink(p+".missing", p)) }},
		{"removed", os.Remove},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if err := tt.harm(filepath.Join(o.BinDir, "coil")); err != nil {
				t.Fatal(err)
			}
			mustRun(t, o)
			if err := exec.Command(filepath.Join(o.BinDir, "coil")).Run(); err != nil {
				t.Errorf("plugin: %v", err)
			}
		})
	}
	live, err := os.ReadFile(filepath.Join(o.EtcDir, o.ConfName))
	if err != nil || string(live) != oldList {
		t.Errorf("configuration in use is %q, %v; it is coild's to change", live, err)
	}
	for f, want := range others {
		if got, err := os.ReadFile(f); err != nil || string(got) != want {
			t.Errorf("%s is %q, %v", f, got, err)
		}
	}
}

// A runtime that starts the plugin during updates always finds a whole program. A
// shell is the runtime: a process that writes programs and forks can't start them
// reliably, since a fork holds the file open for writing until its exec
// (https://go.dev/issue/22315).
func TestPluginCanAlwaysBeStarted(t *testing.T) {
	o := node(t)
	mustRun(t, o)
	dir := t.TempDir()
	runtime := exec.CommandContext(t.Context(), "/bin/sh", "-ec", `while [ ! -e stop ]; do "$0" --version >out; echo x >>starts; done`, filepath.Join(o.BinDir, "coil"))
	runtime.Dir = dir
	var stderr bytes.Buffer
	runtime.Stderr = &stderr
	if err := runtime.Start(); err != nil {
		t.Fatal(err)
	}
	starts := func() int {
		b, _ := os.ReadFile(filepath.Join(dir, "starts"))
		return len(b)
	}
	for i := range 30 {
		copyFile(t, []string{"/bin/cat", "/bin/true"}[i%2], o.CoilPath)
		before := starts()
		if err := run(t, o); err != nil {
			t.Error(err)
		}
		if i%10 == 9 {
			testkit.Eventually(t, 20*time.Second, "the plugin is started", func() error {
				if starts() <= before {
					return errors.New("not yet")
				}
				return nil
			})
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "stop"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := runtime.Wait(); err != nil {
		t.Errorf("a start of the plugin ended with %v: %s", err, stderr.String())
	}
}

func TestBadInputChangesNothing(t *testing.T) {
	tests := []struct {
		name string
		edit func(t *testing.T, o *installer.Options)
		err  string
	}{
		{"configuration is no JSON", func(_ *testing.T, o *installer.Options) { o.NetConf = conflist[:30] }, "network configuration"},
		{"configuration of another plugin", func(_ *testing.T, o *installer.Options) {
			o.NetConf = strings.Replace(conflist, `"coil"`, `"bridge"`, 1)
		}, `plugins of type "coil"`},
		{"configuration of one plugin", func(_ *testing.T, o *installer.Options) {
			o.NetConf = `{"cniVersion":"1.1.0","name":"n","type":"coil"}`
		}, "must be a conflist"},
		{"no such configuration file", func(_ *testing.T, o *installer.Options) { o.NetConfFile = o.CoilPath + ".missing" }, "CNI_NETCONF_FILE"},
		{"no such plugin", func(_ *testing.T, o *installer.Options) { o.CoilPath += ".missing" }, "COIL_PATH"},
		{"plugin is a folder", func(_ *testing.T, o *installer.Options) { o.CoilPath = "/" }, "COIL_PATH"},
		{"plugin is empty", func(t *testing.T, o *installer.Options) { copyFile(t, "/dev/null", o.CoilPath) }, "is not a program"},
		{"plugin is a script", func(t *testing.T, o *installer.Options) {
			if err := os.WriteFile(o.CoilPath, []byte("#!/bin/sh\n"), 0o755); err != nil {
				t.Fatal(err)
			}
		}, "is not a program"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			o := node(t)
			tt.edit(t, o)
			if err := run(t, o); err == nil || !strings.Contains(err.Error(), tt.err) {
				t.Errorf("error is %v, want one with %q", err, tt.err)
			}
			if got := append(testkit.FilesIn(t, o.EtcDir), testkit.FilesIn(t, o.BinDir)...); len(got) != 0 {
				t.Errorf("files %q were written", got)
			}
		})
	}
}

func TestFolderThatIsAFile(t *testing.T) {
	o := node(t)
	o.EtcDir = o.CoilPath
	if err := run(t, o); err == nil || !strings.Contains(err.Error(), "make folder") {
		t.Errorf("error is %v", err)
	}
}

func TestConfigurationFileWins(t *testing.T) {
	o := node(t)
	o.NetConfFile = filepath.Join(t.TempDir(), "f")
	o.NetConf = oldList
	if err := os.WriteFile(o.NetConfFile, []byte(conflist), 0o600); err != nil {
		t.Fatal(err)
	}
	mustRun(t, o)
	if got, err := os.ReadFile(filepath.Join(o.EtcDir, o.ConfName+".staged")); err != nil || string(got) != conflist {
		t.Errorf("staged %q, %v", got, err)
	}
}

// Temporary files of an installer that was killed go; nobody else's do.
func TestLeftovers(t *testing.T) {
	o := node(t)
	if err := os.MkdirAll(o.BinDir, 0o755); err != nil {
		t.Fatal(err)
	}
	old := time.Now().Add(-time.Hour)
	for _, f := range []string{".coil.tmp-1", ".bridge.tmp-2"} {
		p := filepath.Join(o.BinDir, f)
		if err := errors.Join(os.WriteFile(p, nil, 0o600), os.Chtimes(p, old, old)); err != nil {
			t.Fatal(err)
		}
	}
	mustRun(t, o)
	if diff := cmp.Diff([]string{".bridge.tmp-2", "coil"}, testkit.FilesIn(t, o.BinDir)); diff != "" {
		t.Errorf("plugins (-want +got):\n%s", diff)
	}
}

func TestOptions(t *testing.T) {
	env := map[string]string{}
	get := func(k string) string { return env[k] }
	want := &installer.Options{ConfName: "10-coil.conflist", EtcDir: "/host/etc/cni/net.d", BinDir: "/host/opt/cni/bin", CoilPath: "/coil"}
	if diff := cmp.Diff(want, installer.FromEnv(get)); diff != "" {
		t.Errorf("defaults (-want +got):\n%s", diff)
	}
	if err := installer.FromEnv(get).Validate(); err == nil || !strings.Contains(err.Error(), "CNI_NETCONF") {
		t.Errorf("without a configuration: %v", err)
	}
	env = map[string]string{"CNI_CONF_NAME": "a/b", "CNI_ETC_DIR": "etc", "CNI_BIN_DIR": "bin", "COIL_PATH": "coil", "CNI_NETCONF": "", "CNI_NETCONF_FILE": ""}
	err := installer.FromEnv(get).Validate()
	for k := range env {
		if err == nil || !strings.Contains(err.Error(), k) {
			t.Errorf("problems %v don't name %s", err, k)
		}
	}
	env = map[string]string{"CNI_CONF_NAME": "1.conflist", "CNI_ETC_DIR": "/e", "CNI_BIN_DIR": "/b", "COIL_PATH": "/c", "CNI_NETCONF": "{}", "CNI_NETCONF_FILE": "/f"}
	want = &installer.Options{ConfName: "1.conflist", EtcDir: "/e", BinDir: "/b", CoilPath: "/c", NetConf: "{}", NetConfFile: "/f"}
	if diff := cmp.Diff(want, installer.FromEnv(get)); diff != "" {
		t.Errorf("all set (-want +got):\n%s", diff)
	}
	if err := want.Validate(); err != nil {
		t.Error(err)
	}
}

// Main as it is run in the container: environment and exit code.
func TestMainExitCodes(t *testing.T) {
	o := node(t)
	for k, v := range map[string]string{"CNI_CONF_NAME": o.ConfName, "CNI_ETC_DIR": o.EtcDir, "CNI_BIN_DIR": o.BinDir, "COIL_PATH": o.CoilPath, "CNI_NETCONF": o.NetConf, "CNI_NETCONF_FILE": ""} {
		t.Setenv(k, v)
	}
	if got := installer.Main(nil); got != 0 {
		t.Errorf("exit code is %d, want 0", got)
	}
	if got := installer.Main([]string{"surprise"}); got != 2 {
		t.Errorf("with an argument, exit code is %d, want 2", got)
	}
	t.Setenv("CNI_NETCONF", "{")
	if got := installer.Main(nil); got != 1 {
		t.Errorf("with a bad configuration, exit code is %d, want 1", got)
	}
	t.Setenv("CNI_NETCONF", "")
	if got := installer.Main(nil); got != 2 {
		t.Errorf("without a configuration, exit code is %d, want 2", got)
	}
}
