package standby

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// loadEnv says to a process of this test what it is: the server, or how many connections it opens.
const loadEnv = "COIL_TEST_LOAD"

const loadAt = "192.0.2.1:7"

// loadPerSecond is how many connections are opened a second, if the machine can. Each lasts for loadTime.
const (
	loadPerSecond = 1000
	loadTime      = time.Second
)

// serveLoad answers connections until the test ends the process.
func serveLoad(t *testing.T) {
	l := testkit.Must(net.Listen("tcp", loadAt))(t)
	netlab.Serve(l, func(c net.Conn) { _, _ = io.Copy(c, c) })
}

// openLoad opens n connections.
func openLoad(t *testing.T, n int) {
	began := time.Now()
	var all sync.WaitGroup
	for i := range n {
		lasts(t, time.Until(began.Add(time.Duration(i)*time.Second/loadPerSecond)))
		all.Go(func() {
			c, err := net.DialTimeout("tcp", loadAt, 10*time.Second)
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			if _, err := c.Write([]byte{1}); err != nil {
				t.Error(err)
			}
			lasts(t, loadTime)
		})
	}
	fmt.Printf("opened in %s\n", time.Since(began))
	all.Wait()
}

// The processor time that both sides take for a connection that begins and ends: a quarter of a core for 1,000 connections a second.
func TestStandbyLoad(t *testing.T) {
	switch is := os.Getenv(loadEnv); is {
	case "":
	case "server":
		serveLoad(t)
		return
	default:
		openLoad(t, testkit.Must(strconv.Atoi(is))(t))
		return
	}
	testkit.Need(t, testkit.Netns)
	n := testkit.FloatingForm.Times(500, 20000)
	l := newLab(t)
	l.follow(conntrack.FollowBuffer)
	self := testkit.Must(os.Executable())(t)
	server := exec.Command(self, "-test.run=^TestStandbyLoad$")
	server.Env = append(os.Environ(), loadEnv+"=server")
	testkit.Check(t, l.Server.Lab().Start(server))
	t.Cleanup(func() { _ = server.Process.Kill(); _ = server.Wait() })
	testkit.Eventually(t, 10*time.Second, "the server answers", func() error {
		c, err := l.Client.Lab().Dial(t.Context(), "tcp", loadAt)
		if err == nil {
			err = c.Close()
		}
		return err
	})
	began, before := time.Now(), processorTime(t)
	out := testkit.Must(l.Client.Run("env", loadEnv+"="+strconv.Itoa(n), self, "-test.run=^TestStandbyLoad$"))(t)
	count := func(event string) float64 {
		return testutil.ToFloat64(l.w.b.metrics.flows.WithLabelValues(sideReceived, event))
	}
	testkit.Eventually(t, 20*time.Second, "the end of all", func() error {
		if opened, ended := count("opened"), count("ended"); ended < opened {
			return fmt.Errorf("%v of %v have ended", ended, opened)
		}
		return nil
	})
	took := processorTime(t) - before
	each, received := took/time.Duration(n), count("opened")
	t.Logf("%d connections in %s (%q): %s of processor time, %s for each; %v were copied, events were lost %v times", n, time.Since(began), out, took, each, received,
		testutil.ToFloat64(l.w.a.metrics.restarts.WithLabelValues("events_lost")))
	if testkit.FloatingForm.Long() && each > 250*time.Microsecond {
		t.Errorf("each connection takes %s of processor time, want 250µs at most", each)
	}
	if received < float64(n)/2 { // a slow machine ends some before their turn
		t.Errorf("%v of %d connections were copied", received, n)
	}
}

// processorTime is that of this process.
func processorTime(t *testing.T) time.Duration {
	t.Helper()
	var u unix.Rusage
	testkit.Check(t, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
