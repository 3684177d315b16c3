package manifests

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/pkg/testkit"
)

// systemd takes each setting of the units, and the programs take the flags that they are started with. No unit is started: a test has no systemd of its own.
func TestUnits(t *testing.T) {
	testkit.Need(t, testkit.APIServer)
	b := build.Builder{Log: t.Output()}
	files := testkit.Must(filepath.Glob(filepath.Join(manifestsDir(t), "systemd", "*.service")))(t)
	if len(files) == 0 {
		t.Fatal("there are no units")
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".service")
		t.Run(name, func(t *testing.T) {
			text := string(testkit.Must(os.ReadFile(file))(t))
			start := regexp.MustCompile(`(?m)^ExecStart=(/usr/local/bin/\S+)(.*)$`).FindStringSubmatch(text)
			if start == nil || start[1] != "/usr/local/bin/"+name {
				t.Fatalf("it doesn't start /usr/local/bin/%s: %q", name, start)
			}
			bin := testkit.Must(b.Own(t.Context(), "cmd/"+name))(t)
			// The check wants that the program is there.
			copied := filepath.Join(t.TempDir(), name+".service")
			testkit.Check(t, os.WriteFile(copied, []byte(strings.ReplaceAll(text, start[1], bin)), 0o644))
			if out, err := exec.CommandContext(t.Context(), "systemd-analyze", "verify", "--man=no", copied).CombinedOutput(); err != nil || len(out) > 0 {
				t.Errorf("systemd-analyze verify: %v\n%s", err, out)
			}
			args := []string{"--version"}
			for _, a := range strings.Fields(start[2]) {
				if strings.HasPrefix(a, "--") {
					args = append(args, a)
				}
			}
			if out, err := exec.CommandContext(t.Context(), bin, args...).CombinedOutput(); err != nil {
				t.Errorf("%s %q: %v\n%s", name, args, err, out)
			}
			for _, setting := range []string{"NoNewPrivileges=yes", "ProtectSystem=strict", "Restart=always", "StartLimitIntervalSec=0", "WantedBy=multi-user.target"} {
				if !slices.Contains(strings.Split(text, "\n"), setting) {
					t.Errorf("it lacks %s", setting)
				}
			}
		})
	}
}
