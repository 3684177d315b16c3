package coilctl

import (
	"bytes"
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/cli-runtime/pkg/genericiooptions"

	"github.com/coil-net/coil/pkg/plan/selftest"
)

// newTester is a selftest whose pods answer as the function says.
func newTester(ask func(pod string, questions []selftest.Question) ([]selftest.Answer, error)) (*tester, *bytes.Buffer) {
	out := &bytes.Buffer{}
	t := &tool{IOStreams: genericiooptions.IOStreams{Out: out, ErrOut: out}, format: formatTable, colour: colourNever, clock: &clock{}}
	s := &tester{selftestOptions: &selftestOptions{tool: t, timeout: time.Second, port: selftest.Port}, judge: selftest.Judge{Namespace: "s"}, template: selftest.Template{Namespace: "s"},
		walked: map[string][]string{"coilctl why pod s/a": nil, "coilctl why pod s/b": {"coilctl why pod s/b: rules: none"}}}
	s.cancel = func() {}
	s.ask = func(_ context.Context, pod string, questions []selftest.Question) ([]selftest.Answer, error) {
		return ask(pod, questions)
	}
	return s, out
}

// What isn't right is asked again for as long as a check may take, and told once.
func TestSelftestTries(t *testing.T) {
	pods := []selftest.Pod{{Name: "a", Node: "n1", Addrs: []netip.Addr{netip.MustParseAddr("10.0.0.1")}}, {Name: "b", Node: "n2", Addrs: []netip.Addr{netip.MustParseAddr("10.0.1.1")}}}
	right := func(pod string, questions []selftest.Question) (all []selftest.Answer) {
		from, to := pods[0], pods[1]
		if pod == "b" {
			from, to = to, from
		}
		for _, q := range questions {
			all = append(all, selftest.Answer{Question: q.String(), Reached: true, Name: to.Name, Source: netip.AddrPortFrom(from.Addrs[0], 9), Link: &selftest.Link{Name: "eth0", MTU: 1500}})
		}
		return all
	}
	asked := make(chan string, 1000)
	s, out := newTester(func(pod string, questions []selftest.Question) ([]selftest.Answer, error) {
		asked <- pod
		if pod == "b" && len(asked) < 6 {
			return nil, errors.New("it is starting")
		}
		return right(pod, questions), nil
	})
	if err := s.routes(t.Context(), pods); err != nil {
		t.Fatal(err)
	}
	const want = `ok      routes     n1 -> n2: IPv4, by TCP and UDP, with the pod's own source address
ok      mtu        n1 -> n2: IPv4 packets of 1500 bytes pass whole, and longer ones aren't sent
ok      routes     n2 -> n1: IPv4, by TCP and UDP, with the pod's own source address
ok      mtu        n2 -> n1: IPv4 packets of 1500 bytes pass whole, and longer ones aren't sent
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	first := 0
	for range len(asked) {
		if <-asked == "a" {
			first++
		}
	}
	if first != 1 {
		t.Errorf("a pod whose answers are right was asked %d times", first)
	}

	s, out = newTester(func(pod string, questions []selftest.Question) ([]selftest.Answer, error) {
		if pod == "b" {
			return nil, errors.New("exec is forbidden")
		}
		return right(pod, questions), nil
	})
	if err := errors.Join(s.routes(t.Context(), pods), s.show()); err != nil {
		t.Fatal(err)
	}
	if _, failed, _ := strings.Cut(out.String(), "FAILED"); failed != `  routes     n2 -> n1: the pod b couldn't ask: exec is forbidden
                   coilctl why pod s/b: rules: none
                   -> coilctl why node n2
2 checks have succeeded, 1 failed, 0 skipped
` {
		t.Errorf("it says %s", out)
	}

	// An interrupt ends it without a verdict.
	ctx, cancel := context.WithCancel(t.Context())
	s, out = newTester(func(string, []selftest.Question) ([]selftest.Answer, error) {
		cancel()
		return nil, errors.New("interrupted")
	})
	if err := s.routes(ctx, pods); !errors.Is(err, context.Canceled) || out.Len() > 0 {
		t.Errorf("an interrupted selftest: %v, %s", err, out)
	}
}

// Flags that can't be understood are refused before anything is read or removed.
func TestSelftestFlags(t *testing.T) {
	for flag, want := range map[string]string{
		"--at-once=1": "2 or more", "--port=80": "within 1024", "--timeout=1ms": "a second or more", "--egress=nat": "NAMESPACE/NAME", "--egress=a/b/c": "NAMESPACE/NAME", "--image-pull-secret=regcred": "--image-pull-secret can't be \"regcred\": it must be NAMESPACE/NAME", "--destination=x": "--destination: ", "--destination=192.0.2.1": "has no port",
	} {
		var out bytes.Buffer
		code := Main([]string{"coilctl", "--server=http://127.0.0.1:1", "selftest", flag}, strings.NewReader(""), &out, &out)
		if code != 1 || !strings.Contains(out.String(), want) || strings.Contains(out.String(), "127.0.0.1:1") {
			t.Errorf("%s: exit code %d, want 1 and %q: %s", flag, code, want, &out)
		}
	}
}
