package apiserver

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Each watch of Coil's resources loses one event of ten, and expires within seconds, so
// that everything is listed again. A missed event stays without effect no longer than that.
func TestControllerLostEvents(t *testing.T) {
	c := ipamCluster(t)
	c.pool(t, "default", 0, v4("10.50.0.0/23"))
	n := c.node(t, "node")
	c.fakeCoilds(t)
	var dropped, expired atomic.Int64
	c.run(t, intercept(c.serviceAccount(t), func(r *http.Request, next http.RoundTripper) (*http.Response, error) {
		resp, err := next.RoundTrip(r)
		if err == nil && resp.StatusCode == http.StatusOK && strings.Contains(r.URL.Path, "/apis/coil.cybozu.com/") && r.URL.Query().Get("watch") != "" {
			resp.Body = newLossyBody(resp.Body, &dropped, &expired)
		}
		return resp, err
	}), options())
	var requests []string
	for i := range 200 {
		name := fmt.Sprintf("r-%d", i)
		c.ask(t, name, n, "default")
		requests = append(requests, name)
	}
	c.requireOneBlockEach(t, 90*time.Second, requests...)
	// Blocks come and go meanwhile, and their addresses are found again.
	gone := map[string]bool{}
	for _, b := range c.blocksOf(t, "default")[:100] {
		if err := c.drop(t.Context(), &b); err != nil {
			t.Fatal(err)
		}
		gone[b.Name] = true
	}
	var left []string
	for _, name := range requests {
		if gone[c.answer(t, name).Status.AddressBlockName] {
			if err := c.coil.CoilV2().BlockRequests().Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			continue
		}
		left = append(left, name)
	}
	for i := range 300 {
		name := fmt.Sprintf("s-%d", i)
		c.ask(t, name, n, "default")
		left = append(left, name)
	}
	c.requireOneBlockEach(t, 90*time.Second, left...)
	if dropped.Load() == 0 || expired.Load() == 0 {
		t.Errorf("%d events were dropped and %d watches expired: nothing was tested", dropped.Load(), expired.Load())
	}
	t.Logf("%d events were dropped, %d watches expired", dropped.Load(), expired.Load())
}

// lossyBody is the body of a watch that loses events once the initial ones are over.
type lossyBody struct {
	io.Closer
	lines            *bufio.Reader
	rest             []byte
	initial, over    bool
	expire           *time.Timer
	dropped, expired *atomic.Int64
}

// expiredEvent makes client-go list everything again.
const expiredEvent = `{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Expired","code":410}}` + "\n"

func newLossyBody(body io.ReadCloser, dropped, expired *atomic.Int64) *lossyBody {
	b := &lossyBody{Closer: body, lines: bufio.NewReader(body), initial: true, dropped: dropped, expired: expired}
	b.expire = time.AfterFunc(2*time.Second+rand.N(time.Second), func() { body.Close() })
	return b
}

func (b *lossyBody) Read(p []byte) (int, error) {
	for len(b.rest) == 0 {
		if b.over {
			return 0, io.EOF
		}
		line, err := b.lines.ReadBytes('\n')
		if err != nil {
			// The connection ended, most likely because its time had come.
			b.over = true
			b.rest = []byte(expiredEvent)
			b.expired.Add(1)
			break
		}
		if !b.initial && bytes.HasPrefix(line, []byte(`{"type":"`)) && !bytes.HasPrefix(line, []byte(`{"type":"BOOKMARK"`)) && rand.IntN(10) == 0 {
			b.dropped.Add(1)
			continue
		}
		if bytes.Contains(line, []byte("k8s.io/initial-events-end")) {
			b.initial = false
		}
		b.rest = line
	}
	n := copy(p, b.rest)
	b.rest = b.rest[n:]
	return n, nil
}

func (b *lossyBody) Close() error {
	b.expire.Stop()
	return b.Closer.Close()
}
