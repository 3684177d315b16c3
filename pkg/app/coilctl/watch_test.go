package coilctl_test

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/app/coilctl"
	"github.com/coil-net/coil/pkg/testkit"
)

// watching is a command with --watch.
type watching struct {
	t     *testing.T
	lines chan string
	code  chan int
	err   testkit.Buffer
}

// watch starts a command with --watch that writes to out, whose other end is read.
func (a *api) watch(t *testing.T, out io.WriteCloser, read io.Reader, args ...string) *watching {
	t.Helper()
	return a.start(t, out, read, append(args, "--watch")...)
}

// start starts a command that goes on.
func (a *api) start(t *testing.T, out io.WriteCloser, read io.Reader, args ...string) *watching {
	t.Helper()
	// The process must outlive the signal, also if the command has ended already.
	caught := make(chan os.Signal, 1)
	signal.Notify(caught, os.Interrupt)
	t.Cleanup(func() { signal.Stop(caught) })
	w := &watching{t: t, lines: make(chan string, 1000), code: make(chan int, 1)}
	go func() {
		code := coilctl.Main(append([]string{"coilctl", "--server=" + a.url}, args...), strings.NewReader(""), out, &w.err)
		out.Close()
		w.code <- code
	}()
	go func() {
		for s := bufio.NewScanner(read); s.Scan(); {
			w.lines <- s.Text()
		}
		close(w.lines)
	}()
	return w
}

// wants waits for lines, whose fields are compared.
func (w *watching) wants(lines ...string) {
	w.t.Helper()
	for _, want := range lines {
		select {
		case got, ok := <-w.lines:
			if text := strings.Join(strings.Fields(got), " "); !ok || text != want {
				w.t.Fatalf("a line is %q, want %q", text, want)
			}
		case <-time.After(testkit.Timeout(20 * time.Second)):
			w.t.Fatalf("there is no line %q", want)
		}
	}
}

// interrupt ends the command as Ctrl-C does.
func (w *watching) interrupt() {
	w.t.Helper()
	if said := w.end(); said != "" {
		w.t.Errorf("it says %s", said)
	}
}

// end is interrupt for one that may have said something, which it returns.
func (w *watching) end() string {
	w.t.Helper()
	testkit.Check(w.t, syscall.Kill(os.Getpid(), syscall.SIGINT))
	select {
	case code := <-w.code:
		if code != 0 {
			w.t.Errorf("exit code %d", code)
		}
	case <-time.After(testkit.Timeout(20 * time.Second)):
		w.t.Fatal("it goes on")
	}
	return w.err.String()
}

// used is a block with other use.
func used(b *v2.AddressBlock, n int32) *v2.AddressBlock {
	c := b.DeepCopy()
	c.ResourceVersion, c.Status.Allocated = fmt.Sprint(n), n
	return c
}

// A watch prints what there is, and then what changes, comes and goes: as lines of tables and of JSON, and as documents of YAML. It asks once, and ends when it is interrupted.
func TestWatch(t *testing.T) {
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	for format, want := range map[string][]string{
		"table": {
			"EVENT NAME NODE POOL IPV4 IPV6 USED COOLING CHANGED",
			"ADDED default-1 n2 default 10.0.0.0/27 fd00::/123 0/32 0 36h", "ADDED default-11 n1 default 10.0.0.32/27 fd00::20/123 3/32 1 36h",
			"MODIFIED default-11 n1 default 10.0.0.32/27 fd00::20/123 9/32 1 36h",
			"DELETED default-1 n2 default 10.0.0.0/27 fd00::/123 0/32 0 36h",
		},
		"json": {`{"type":"ADDED","object":{"name":"default-1",`, `{"type":"ADDED","object":{"name":"default-11",`, `{"type":"MODIFIED","object":{"name":"default-11",`, `{"type":"DELETED","object":{"name":"default-1",`},
		"yaml": {"name: default-1 type: ADDED", "name: default-11 type: ADDED", "name: default-11 type: MODIFIED", "name: default-1 type: DELETED"},
	} {
		t.Run(format, func(t *testing.T) {
			o := cluster()
			a := serve(t, o)
			r, out := io.Pipe()
			var read io.Reader = r
			switch format {
			case "json": // only the beginning of each line
				read = shortened(r, func(line string) string { before, _, _ := strings.Cut(line, `"pool"`); return before })
			case "yaml": // only names and types, of each document in one line
				var name string
				read = shortened(r, func(line string) string {
					switch f := strings.TrimSpace(line); {
					case strings.HasPrefix(f, "name: "):
						name = f
					case strings.HasPrefix(f, "type: "):
						return name + " " + f
					}
					return ""
				})
			}
			w := a.watch(t, out, read, "blocks", "-o", format)
			begin := len(want) - 2
			w.wants(want[:begin]...)
			a.told["addressblocks"] <- eventOf("MODIFIED", "addressblocks", used(o.Blocks[0], 9))
			w.wants(want[begin])
			a.told["addressblocks"] <- eventOf("DELETED", "addressblocks", o.Blocks[1])
			w.wants(want[begin+1])
			w.interrupt()
			if !slices.Equal(a.asked, []string{"addressblocks", "addressblocks"}) { // a list and a watch
				t.Errorf("it has asked for %q", a.asked)
			}
		})
	}
}

// shortened changes each line, and leaves out those of which nothing is left.
func shortened(r io.Reader, change func(string) string) io.Reader {
	read, write := io.Pipe()
	go func() {
		for s := bufio.NewScanner(r); s.Scan(); {
			if line := change(s.Text()); line != "" {
				fmt.Fprintln(write, line)
			}
		}
		write.Close()
	}()
	return read
}

// A watch that the API server refuses ends with its error.
func TestWatchRefused(t *testing.T) {
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	a := serve(t, cluster())
	a.refused = "pods"
	if code, out, errOut := a.run("coilctl", "nodes", "--watch"); code != 1 || out != "" || errOut != "error: watch pods: no right\n" {
		t.Errorf("exit code %d, %q, %q", code, out, errOut)
	}
}

// A watch that the API server ends, and then refuses for a moment, is opened again, and what has changed meanwhile is shown.
func TestWatchAgain(t *testing.T) {
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	o := cluster()
	a := serve(t, o)
	r, out := io.Pipe()
	w := a.watch(t, out, r, "nodes", "n1")
	w.wants("EVENT NAME READY COILD BLOCKS ADDRESSES FLOATING", "ADDED n1 True False 1 3/32 1")
	a.refuse("addressblocks")
	a.disconnect()
	testkit.Eventually(t, 20*time.Second, "it says so", func() error {
		text := w.err.String()
		if !strings.Contains(text, "warning: watch addressblocks: no right") || !strings.HasSuffix(text, "; what is shown may be old until that ends\n") {
			return fmt.Errorf("it says %q", text)
		}
		return nil
	})
	a.mu.Lock()
	a.all["addressblocks"][0] = used(o.Blocks[0], 9)
	a.mu.Unlock()
	a.refuse("")
	w.wants("MODIFIED n1 True False 1 9/32 1")
	w.end()
}

// On a terminal the whole table is drawn again after each change, as far as there is room. So are maps.
func TestRedraw(t *testing.T) {
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	t.Setenv("NO_COLOR", "1")
	const clear = "\x1b[H\x1b[2J\x1b[3J"
	for _, tt := range []struct {
		args          string
		rows          uint16
		first, second []string
	}{
		{"blocks", 10,
			[]string{clear + "NAME NODE POOL IPV4 IPV6 USED COOLING CHANGED", "default-1 n2 default 10.0.0.0/27 fd00::/123 0/32 0 36h", "default-11 n1 default 10.0.0.32/27 fd00::20/123 3/32 1 36h"},
			[]string{clear + "NAME NODE POOL IPV4 IPV6 USED COOLING CHANGED", "default-1 n2 default 10.0.0.0/27 fd00::/123 0/32 0 36h", "default-11 n1 default 10.0.0.32/27 fd00::20/123 9/32 1 36h"}},
		{"blocks", 3,
			[]string{clear + "NAME NODE POOL IPV4 IPV6 USED COOLING CHANGED", "... and 2 more lines"},
			[]string{clear + "NAME NODE POOL IPV4 IPV6 USED COOLING CHANGED", "... and 2 more lines"}},
		{"pools --map --cells=4", 3,
			[]string{clear + "AddressPool default", "... and 4 more lines"},
			[]string{clear + "AddressPool default", "... and 4 more lines"}},
	} {
		o := cluster()
		a := serve(t, o)
		terminal, program := openTerminal(t, tt.rows)
		w := a.watch(t, program, terminal, strings.Fields(tt.args)...)
		w.wants(tt.first...)
		a.told["addressblocks"] <- eventOf("MODIFIED", "addressblocks", used(o.Blocks[0], 9))
		w.wants(tt.second...)
		w.interrupt()
	}
}

// openTerminal returns both ends of a terminal with some lines.
func openTerminal(t *testing.T, rows uint16) (outside, inside *os.File) {
	t.Helper()
	outside = testkit.Must(os.OpenFile("/dev/ptmx", os.O_RDWR, 0))(t)
	t.Cleanup(func() { outside.Close() })
	fd := int(outside.Fd())
	n := testkit.Must(unix.IoctlGetInt(fd, unix.TIOCGPTN))(t)
	testkit.Check(t, unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0), unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: 200}))
	return outside, testkit.Must(os.OpenFile(fmt.Sprint("/dev/pts/", n), os.O_RDWR|syscall.O_NOCTTY, 0))(t)
}
