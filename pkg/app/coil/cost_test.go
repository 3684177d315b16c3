package coil_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/testkit"
)

const (
	maxSize  = 6 << 20
	maxStart = 15 * time.Millisecond
)

func TestPluginIsSmall(t *testing.T) {
	info, err := os.Stat(filepath.Join(bin, "coil"))
	if err != nil {
		t.Fatal(err)
	}
	if info.Size() > maxSize {
		t.Errorf("plugin has %d bytes, want at most %d", info.Size(), maxSize)
	}
	t.Logf("plugin has %.1f MiB", float64(info.Size())/(1<<20))
}

// The start takes little time of a processor, which other programs hardly change, and doesn't wait: the fastest run shows that.
func TestPluginStartsFast(t *testing.T) {
	const runs = 101
	var took []time.Duration
	fastest := time.Hour
	for range runs {
		cmd := exec.Command(filepath.Join(bin, "coil"))
		cmd.Env = []string{"CNI_COMMAND=VERSION"}
		start := time.Now()
		if err := cmd.Run(); err != nil {
			t.Fatal(err)
		}
		fastest = min(fastest, time.Since(start))
		took = append(took, cmd.ProcessState.UserTime()+cmd.ProcessState.SystemTime())
	}
	slices.Sort(took)
	if limit := testkit.Limit(maxStart); took[runs/2] > limit || fastest > limit {
		t.Errorf("VERSION takes %v of a processor (p50), and %v at least, want at most %v", took[runs/2], fastest, maxStart)
	}
	t.Logf("VERSION takes p50 %v, p90 %v of a processor, and %v at least", took[runs/2], took[runs*9/10], fastest)
}

// The packages that the plugin links decide how fast it starts.
func TestPluginLinksLittle(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "github.com/coil-net/coil/cmd/coil").Output()
	if err != nil {
		t.Fatal(err)
	}
	for dep := range strings.Lines(string(out)) {
		dep = strings.TrimSpace(dep)
		for _, banned := range []string{
			"google.golang.org/grpc", "google.golang.org/protobuf", "k8s.io/", "modernc.org/", "github.com/google/nftables",
			"github.com/containernetworking/", "net", "net/netip", "regexp", "crypto", "crypto/sha256",
		} {
			if dep == banned || strings.HasPrefix(dep, strings.TrimSuffix(banned, "/")+"/") {
				t.Errorf("plugin links %s", dep)
			}
		}
	}
}

// BenchmarkVersion and BenchmarkAdd measure whole processes; the daemon of ADD is
// grpc-go and answers at once.
func BenchmarkVersion(b *testing.B) {
	bench(b, func() *exec.Cmd {
		cmd := exec.Command(filepath.Join(bin, "coil"))
		cmd.Env = []string{"CNI_COMMAND=VERSION"}
		return cmd
	})
}

func BenchmarkAdd(b *testing.B) {
	socket := filepath.Join(b.TempDir(), "s")
	stop, err := (&daemon{answer: result}).serve(socket)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(stop)
	stdin := `{"cniVersion":"1.1.0","name":"n","type":"coil","socket":"` + socket + `"}`
	bench(b, func() *exec.Cmd {
		cmd := exec.Command(filepath.Join(bin, "coil"))
		cmd.Env = []string{"CNI_COMMAND=ADD", "CNI_CONTAINERID=c", "CNI_NETNS=/x", "CNI_IFNAME=eth0", "CNI_PATH=/p",
			"CNI_ARGS=K8S_POD_NAMESPACE=ns;K8S_POD_NAME=pod"}
		cmd.Stdin = strings.NewReader(stdin)
		return cmd
	})
}

func bench(b *testing.B, cmd func() *exec.Cmd) {
	var took []time.Duration
	for b.Loop() {
		c := cmd()
		start := time.Now()
		if out, err := c.Output(); err != nil {
			b.Fatalf("%v: %s", err, out)
		}
		took = append(took, time.Since(start))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "p50-ms")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds())/1000, "p99-ms")
}
