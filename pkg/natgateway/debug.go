package natgateway

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/coil-net/coil/pkg/observe"
	"github.com/coil-net/coil/pkg/plan/inspection"
)

// AnswerWithin is how long the router looks before it answers with what it has found by then, and answersAtOnce how many answers are made at once.
const (
	AnswerWithin  = 1500 * time.Millisecond
	answersAtOnce = 4
)

// Debug answers what people ask about a router.
type Debug struct {
	Gateway *Gateway
	Readers Readers
	Version string
	// NotReady says why the router serves no clients; nil if it does.
	NotReady func() error
}

// Serve answers at a unix socket until ctx ends.
func (d *Debug) Serve(ctx context.Context, socket string) error {
	return observe.ServeSocket(ctx, socket, AnswerWithin, d.handler())
}

// DebugPath is the path of a question that words ask: "router", "client ADDRESS", "pod NAMESPACE/NAME", "way ADDRESS DESTINATION", or "flows ADDRESS PROTOCOL DESTINATION PORT ID[,ID...]".
func DebugPath(words []string) (string, error) {
	switch {
	case len(words) == 1 && words[0] == "router":
		return "/router", nil
	case len(words) == 2 && words[0] == "client":
		a, err := netip.ParseAddr(words[1])
		return "/client/" + a.WithZone("").String(), err
	case len(words) == 2 && words[0] == "pod":
		return inspection.PodPath("/pod/", words[1])
	case len(words) == 3 && words[0] == "way":
		from, err := netip.ParseAddr(words[1])
		to, e := netip.ParseAddr(words[2])
		return "/way/" + from.WithZone("").String() + "/" + to.WithZone("").String(), errors.Join(err, e)
	case len(words) == 6 && words[0] == "flows":
		f, err := inspection.ParseFlows(words[1:])
		return "/flows/" + strings.Join(f.Words(), "/"), err
	}
	return "", errors.New("ask for router, for client ADDRESS, for pod NAMESPACE/NAME, for way ADDRESS DESTINATION, or for flows ADDRESS PROTOCOL DESTINATION PORT ID[,ID...]")
}

// handler has a path for each question; see DebugPath.
func (d *Debug) handler() http.Handler {
	all := observe.NewQuestions(answersAtOnce, AnswerWithin)
	about := func(path string, find func(*http.Request) (question, error)) {
		all.Answer(path, func(r *http.Request) (func(context.Context) ([]byte, error), error) {
			q, err := find(r)
			return func(ctx context.Context) ([]byte, error) { return d.answer(ctx, q).Write(inspection.Limit) }, err
		})
	}
	about("/router", func(*http.Request) (question, error) {
		return question{text: "router", brief: true, client: func(netip.Addr, []string) bool { return true }}, nil
	})
	about("/client/{address}", func(r *http.Request) (question, error) {
		addr, err := netip.ParseAddr(r.PathValue("address"))
		return question{text: "client " + addr.String(), client: is(addr)}, err
	})
	about("/pod/{namespace}/{name}", func(r *http.Request) (question, error) {
		pod := r.PathValue("namespace") + "/" + r.PathValue("name")
		return question{text: "pod " + pod, client: func(_ netip.Addr, pods []string) bool { return slices.Contains(pods, pod) }}, nil
	})
	about("/way/{from}/{to}", func(r *http.Request) (question, error) {
		from, err := netip.ParseAddr(r.PathValue("from"))
		to, e := netip.ParseAddr(r.PathValue("to"))
		return question{text: fmt.Sprintf("way %s %s", from, to), client: is(from), from: from, to: to}, errors.Join(err, e)
	})
	about("/flows/{from}/{protocol}/{to}/{port}/{ids}", func(r *http.Request) (question, error) {
		var words []string
		for _, name := range []string{"from", "protocol", "to", "port", "ids"} {
			words = append(words, r.PathValue(name))
		}
		f, err := inspection.ParseFlows(words)
		return question{text: "flows " + strings.Join(words, " "), client: is(f.Client), flows: f}, err
	})
	return all
}

// is selects the client of an address.
func is(addr netip.Addr) func(netip.Addr, []string) bool {
	return func(a netip.Addr, _ []string) bool { return a == addr }
}

// answer finds everything out.
func (d *Debug) answer(ctx context.Context, q question) inspection.RouterAnswer {
	a := d.Gateway.inspect(ctx, d.Readers, q)
	a.Router.Version, a.Router.Now = d.Version, time.Now()
	if err := d.NotReady(); err != nil {
		a.Router.NotReady = err.Error()
	}
	return a
}
