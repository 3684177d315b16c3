package sysctl_test

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/sysctl"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// homeEnv says to a process of this test that it runs in a namespace of its own.
const homeEnv = "COIL_TEST_SYSCTL_HOME"

func acceptRA(link string) string { return "net/ipv6/conf/" + link + "/accept_ra" }

// A process reads and sets parameters of the namespace that it was started in, also those of links that are made later,
// and never those of another namespace.
func TestHome(t *testing.T) {
	if os.Getenv(homeEnv) == "" {
		ns := netnstest.New(t)
		ns.IP(t, "link", "add", "early", "type", "bridge")
		if out, err := ns.Run("env", homeEnv+"=1", testkit.Must(os.Executable())(t), "-test.run=^TestHome$", "-test.v"); err != nil || !strings.Contains(out, "--- PASS: TestHome") {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	other := testkit.Must(netns.New())(t)
	defer other.Close()
	check := func(link string) {
		t.Helper()
		for _, home := range []*netns.NS{nil, testkit.Must(netns.Current())(t)} {
			for _, value := range []string{"2", "0"} {
				changed, err := sysctl.Set(home, sysctl.Setting{Key: acceptRA(link), Value: value})
				if err != nil || !changed {
					t.Errorf("%s = %s: changed %t, %v", link, value, changed, err)
				}
				if changed, err = sysctl.Set(home, sysctl.Setting{Key: acceptRA(link), Value: value}); err != nil || changed {
					t.Errorf("%s = %s again: changed %t, %v", link, value, changed, err)
				}
				if got := strings.TrimSpace(string(testkit.Must(os.ReadFile("/proc/sys/" + acceptRA(link)))(t))); got != value {
					t.Errorf("%s is %q, want %q", link, got, value)
				}
				if got, err := sysctl.Get(home, acceptRA(link)); got != value || err != nil {
					t.Errorf("%s reads %q, %v, want %q", link, got, err, value)
				}
			}
		}
		if _, err := sysctl.Get(other, acceptRA(link)); !errors.Is(err, sysctl.ErrNotExist) {
			t.Errorf("another namespace has %s: %v", link, err)
		}
	}
	check("early")
	testkit.Must(exec.Command("ip", "link", "add", "late", "type", "bridge").CombinedOutput())(t)
	check("late")
	testkit.Must(exec.Command("ip", "link", "del", "late").CombinedOutput())(t)
	if _, err := sysctl.Set(nil, sysctl.Setting{Key: acceptRA("late"), Value: "0"}); !errors.Is(err, sysctl.ErrNotExist) {
		t.Errorf("of a link that is gone: %v", err)
	}
}

// A parameter that can't be written is no error if it has the value.
func TestReadOnly(t *testing.T) {
	if os.Getenv(homeEnv) == "" {
		ns := netnstest.New(t)
		const script = `mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys && exec "$0" -test.run='^TestReadOnly$' -test.v`
		out, err := ns.Run("env", homeEnv+"=1", "unshare", "--mount", "sh", "-c", script, testkit.Must(os.Executable())(t))
		if err != nil || !strings.Contains(out, "--- PASS: TestReadOnly") {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	for _, key := range []string{acceptRA("lo"), forward4} {
		value := testkit.Must(sysctl.Get(nil, key))(t)
		if changed, err := sysctl.Set(nil, sysctl.Setting{Key: key, Value: value}); err != nil || changed {
			t.Errorf("%s has the value: changed %t, %v", key, changed, err)
		}
		if _, err := sysctl.Set(nil, sysctl.Setting{Key: key, Value: "9"}); !errors.Is(err, unix.EROFS) {
			t.Errorf("%s = 9: %v, want that it is read-only", key, err)
		}
	}
}
