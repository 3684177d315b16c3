package debug

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/observe"
	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit"
)

// Packets are sent from the pod's network, as they were ordered, and the answer has what became of them.
func TestSend(t *testing.T) {
	s := newServer(record{all: []store.Allocation{alloc("c2", "twice", "10.0.0.1"), alloc("c1", "twice", "10.0.0.2"), alloc("c2", "gone", "10.0.0.3")}})
	var from []string
	s.Send = func(_ context.Context, a store.Allocation, o inspection.Order) (inspection.Sending, error) {
		from = append(from, a.ContainerID+" "+strings.Join(o.Words(), " "))
		if o.Count == 9 {
			return inspection.Sending{}, errors.New("no socket")
		}
		return inspection.Sending{Protocol: o.Protocol, Packets: []inspection.SentPacket{{ID: 7, Arrived: true}}}, nil
	}
	a := mustAsk(t, s, "/send/shop/twice/tcp/2001:db8::5/443/3")
	if a.Question != "send shop/twice tcp 2001:db8::5 443 3" || a.Node.Name != "n1" || a.Sending == nil || len(a.Sending.Packets) != 1 || a.Sending.Packets[0].ID != 7 {
		t.Errorf("%+v", a)
	}
	for path, want := range map[string]struct {
		code int
		says string
	}{
		"/send/shop/twice/icmp/203.0.113.5/0/9":   {http.StatusInternalServerError, "no socket"},
		"/send/shop/gone/icmp/203.0.113.5/0/1":    {http.StatusInternalServerError, "no network of pod shop/gone"},
		"/send/shop/nobody/icmp/203.0.113.5/0/1":  {http.StatusInternalServerError, "no network of pod shop/nobody"},
		"/send/shop/twice/icmp/203.0.113.5/0/11":  {http.StatusBadRequest, "1 to 10"},
		"/send/shop/twice/tcp/203.0.113.5/0/1":    {http.StatusBadRequest, "need a port"},
		"/send/shop/twice/icmp/203.0.113.5/0":     {http.StatusNotFound, ""},
		"/send/shop/twice/icmp/example.org/0/1":   {http.StatusBadRequest, "example.org"},
		"/send/shop/twice/icmp/203.0.113.5/0/1/1": {http.StatusNotFound, ""},
	} {
		if code, text := ask(t, s, path); code != want.code || !strings.Contains(text, want.says) {
			t.Errorf("%s: %d, %q; want %d, %q", path, code, text, want.code, want.says)
		}
	}
	if d := cmp.Diff([]string{"c1 tcp 2001:db8::5 443 3", "c1 icmp 203.0.113.5 0 9"}, from); d != "" {
		t.Errorf("sent (-want +got):\n%s", d)
	}
}

// Whoever asks at the socket may wait longer than for other answers.
func TestSendTakesLong(t *testing.T) {
	s := newServer(record{all: []store.Allocation{alloc("c1", "a", "10.0.0.1")}})
	s.Send = func(ctx context.Context, _ store.Allocation, _ inspection.Order) (inspection.Sending, error) {
		select {
		case <-ctx.Done():
			return inspection.Sending{}, ctx.Err()
		case <-time.After(Within + 1100*time.Millisecond): // for these the server would read and write, but for this question
			return inspection.Sending{Protocol: inspection.ICMP}, nil
		}
	}
	var text bytes.Buffer
	testkit.Must(observe.AskSocket(t.Context(), served(t, s), testkit.Must(Path(strings.Fields("send shop/a icmp 203.0.113.5 0 1")))(t), inspection.Limit, &text))(t)
	if a, err := inspection.Parse(text.Bytes()); err != nil || a.Sending == nil || a.Sending.Protocol != inspection.ICMP {
		t.Errorf("%+v, %v", a, err)
	}
}

// Packets are sent for one at a time. Other questions are answered meanwhile.
func TestSendForOne(t *testing.T) {
	s := newServer(record{all: []store.Allocation{alloc("c1", "a", "10.0.0.1")}})
	entered, leave := make(chan struct{}), make(chan struct{})
	s.Send = func(context.Context, store.Allocation, inspection.Order) (inspection.Sending, error) {
		close(entered)
		<-leave
		return inspection.Sending{}, nil
	}
	h, first := s.handler(), make(chan int)
	get := func(path string) int {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil))
		return w.Code
	}
	const path = "/send/shop/a/icmp/203.0.113.5/0/1"
	go func() { first <- get(path) }()
	<-entered
	if code := get(path); code != http.StatusServiceUnavailable {
		t.Errorf("meanwhile: %d", code)
	}
	if code := get("/pod/shop/a"); code != http.StatusOK {
		t.Errorf("another question meanwhile: %d", code)
	}
	close(leave)
	if code := <-first; code != http.StatusOK {
		t.Errorf("the first one: %d", code)
	}
}

func TestSendPath(t *testing.T) {
	for words, want := range map[string]string{
		"send shop/a tcp 203.0.113.5 443 3": "/send/shop/a/tcp/203.0.113.5/443/3", "send shop/a icmp fe80::1%eth0 0 1": "/send/shop/a/icmp/fe80::1/0/1",
		"send shop/a tcp 203.0.113.5 443": "", "send a tcp 203.0.113.5 443 3": "", "send shop/a tcp 203.0.113.5 443 11": "", "send shop/a sctp 203.0.113.5 443 1": "", "send": "",
	} {
		got, err := Path(strings.Fields(words))
		if (err == nil) != (want != "") || err == nil && (got != want || !Sends(got)) {
			t.Errorf("%q: %q, %v; want %q", words, got, err, want)
		}
	}
	if Sends("/way/shop/a/203.0.113.5") || Sends(PathDB) {
		t.Error("questions that send nothing are said to send")
	}
}
