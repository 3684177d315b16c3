package machine

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseHierarchy(t *testing.T) {
	for _, tc := range []struct {
		name, line string
		want       Hierarchy
		ok         bool
	}{
		{
			"version 1", "33 31 0:29 / /sys/fs/cgroup/memory rw,relatime shared:15 - cgroup cgroup rw,memory",
			Hierarchy{Mountpoint: "/sys/fs/cgroup/memory", Options: "memory"}, true,
		},
		{
			"two controllers, mounted below the link cpu,cpuacct", "34 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct",
			Hierarchy{Mountpoint: "/sys/fs/cgroup/cpu,cpuacct", Options: "cpu,cpuacct"}, true,
		},
		{
			"named", "35 31 0:31 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,release_agent=/lib/systemd/x,name=systemd",
			Hierarchy{Mountpoint: "/sys/fs/cgroup/systemd", Options: "name=systemd"}, true,
		},
		{
			"version 2", "26 22 0:23 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate",
			Hierarchy{Mountpoint: "/sys/fs/cgroup", V2: true}, true,
		},
		{
			"a container's own mount elsewhere", "99 22 0:23 / /var/lib/x/sys/fs/cgroup rw - cgroup2 cgroup2 rw",
			Hierarchy{}, false,
		},
		{"other", "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw", Hierarchy{}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, ok := parseHierarchy(tc.line)
			if d := cmp.Diff(tc.want, got); d != "" || ok != tc.ok {
				t.Errorf("ok is %t, want %t (-want +got):\n%s", ok, tc.ok, d)
			}
		})
	}
}

func TestParseStat(t *testing.T) {
	line := "42 (a ) Z (b) S 1 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 987654 1 1 1\n"
	start, state, err := parseStat([]byte(line))
	if err != nil || start != 987654 || state != 'S' {
		t.Errorf("start %d, state %c, error %v; want 987654, S, none", start, state, err)
	}
	if _, _, err := parseStat([]byte("42 (x) S 1")); err == nil {
		t.Error("a truncated line was accepted")
	}
}

func TestMarked(t *testing.T) {
	env := []byte("PATH=/bin\x00" + Marker + "=/var/lib/coil-lab/a/coil-worker\x00")
	for prefix, want := range map[string]bool{
		"/var/lib/coil-lab/a":  true,
		"/var/lib/coil-lab/a/": true,
		"/var/lib/coil-lab/":   true,
		"/var/lib/coil-lab/aa": false,
		"/var/lib/coil-lab/b":  false,
	} {
		if got := marked(env, prefix); got != want {
			t.Errorf("marked below %s: %t, want %t", prefix, got, want)
		}
	}
}

func TestSpecValidate(t *testing.T) {
	err := Spec{Root: true, Components: []Component{{Name: "a/b", Path: "/x"}, {Name: "c"}, {Name: "c", Path: "/c"}}}.Validate()
	if err == nil {
		t.Fatal("a broken spec was accepted")
	}
	want := "no host name\n" +
		"a machine with a disk needs a boot ID and a machine ID\n" +
		"component \"a/b\": bad name or no path\n" +
		"component \"c\": bad name or no path\n" +
		"component \"c\": twice"
	if d := cmp.Diff(want, err.Error()); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
}
