package inspection

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// long has n attachments, blocks and problems.
func long(n int) Answer {
	a := Answer{Question: "node n1", Host: []Comparison{{Topic: Rules, Object: "rule", Want: "2000:", OK: true}}}
	for i := range n {
		a.Attachments = append(a.Attachments, Attachment{
			Record:  Record{Namespace: "shop", Pod: fmt.Sprint("pod-", i), Addresses: []string{"10.0.0.1"}},
			Objects: []Comparison{{Topic: Veth, Object: "MTU", Want: "1500", Have: "1400"}},
		})
		a.Blocks = append(a.Blocks, Block{Name: fmt.Sprint("default-", i)})
		a.Problems = append(a.Problems, strings.Repeat("x", 100))
	}
	return a
}

func TestWrite(t *testing.T) {
	for _, c := range []struct {
		name      string
		answer    Answer
		limit     int
		truncated bool
	}{
		{"short", long(1), Limit, false},
		{"as long as it may be", long(500), Limit, false},
		{"too many attachments", long(5000), Limit, true},
		{"one attachment is too long", func() Answer {
			a := long(1)
			for range 5000 {
				a.Attachments[0].Objects = append(a.Attachments[0].Objects, a.Attachments[0].Objects[0])
			}
			return a
		}(), 10_000, true},
		{"only the question has room", long(100), 700, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := len(c.answer.Attachments)
			text, err := c.answer.Write(c.limit)
			if err != nil {
				t.Fatal(err)
			}
			if len(text) > c.limit || text[len(text)-1] != '\n' {
				t.Errorf("%d bytes", len(text))
			}
			got, err := Parse(text)
			if err != nil {
				t.Fatal(err)
			}
			if said := strings.Contains(got.Truncated, fmt.Sprintf("limited to %d bytes", c.limit)); said != c.truncated {
				t.Errorf("truncated: %q", got.Truncated)
			}
			if !c.truncated {
				if d := cmp.Diff(&c.answer, got); d != "" {
					t.Errorf("read otherwise than written (-want +got):\n%s", d)
				}
			}
			if len(c.answer.Attachments) != before || got.Question != "node n1" {
				t.Errorf("the answer itself was changed, or has another question: %q", got.Question)
			}
		})
	}
	if _, err := long(1).Write(100); err == nil {
		t.Error("100 bytes are enough")
	}
	if _, err := Parse([]byte("no JSON")); err == nil {
		t.Error("no JSON is an answer")
	}
}

func TestComparisonString(t *testing.T) {
	for want, c := range map[string]Comparison{
		"MTU of veth1 is 1500":                        {Object: "MTU of veth1", Want: "1500", Have: "1500", OK: true},
		"MTU of veth1 is 1400, not 1500":              {Object: "MTU of veth1", Want: "1500", Have: "1400"},
		"route is missing: it should be 10.0.0.1 dev": {Object: "route", Want: "10.0.0.1 dev"},
		"route isn't known: no buffer space":          {Object: "route", Want: "x", OK: true, Unknown: "no buffer space"},
		"client: tunnel is missing":                   {Object: "client", Have: "tunnel is missing"},
		"the guard is off":                            {Object: "the guard is off"},
	} {
		if got := c.String(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestWrong(t *testing.T) {
	all := []Comparison{{Object: "a", OK: true}, {Object: "b"}, {Object: "c", OK: true, Unknown: "why"}}
	if d := cmp.Diff(all[1:], Wrong(all)); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

// An answer of a router is cut as one of coild is.
func TestWriteRouter(t *testing.T) {
	a := RouterAnswer{Question: "router"}
	for range 500 {
		a.Clients = append(a.Clients, RouterClient{Address: "10.0.0.1", Pods: []string{"shop/cart-0"}})
		a.Router.Destinations = append(a.Router.Destinations, "203.0.113.0/24")
		a.Router.Over = append(a.Router.Over, "10.0.0.1")
		a.Problems = append(a.Problems, "x")
	}
	for limit, truncated := range map[int]bool{Limit: false, 30_000: true, 3_000: true, 1_000: true} {
		text, err := a.Write(limit)
		if err != nil || len(text) > limit {
			t.Fatalf("%d: %d bytes, %v", limit, len(text), err)
		}
		got, err := ParseRouter(text)
		if err != nil || (got.Truncated != "") != truncated || got.Question != "router" || !truncated && len(got.Clients) != 500 {
			t.Errorf("%d: %v, %q with %d clients", limit, err, got.Truncated, len(got.Clients))
		}
	}
	if _, err := a.Write(100); err == nil {
		t.Error("100 bytes are too few for the router")
	}
	if _, err := ParseRouter([]byte("no JSON")); err == nil {
		t.Error("what isn't an answer was understood")
	}
}
