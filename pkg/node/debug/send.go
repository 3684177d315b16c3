package debug

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/store"
)

// pathSend begins the paths of the question that sends packets.
const pathSend = "/send/"

// SendWithin is longer than packets are sent, and their answers are waited for.
const SendWithin = 8 * time.Second

// Sends says whether a question sends packets.
func Sends(path string) bool { return strings.HasPrefix(path, pathSend) }

// sendPath is the path of "send NAMESPACE/NAME PROTOCOL ADDRESS PORT COUNT", without the first word.
func sendPath(words []string) (string, error) {
	path, err := inspection.PodPath(pathSend, words[0])
	if err != nil {
		return "", err
	}
	o, err := inspection.ParseOrder(words[1:])
	return path + "/" + strings.Join(o.Words(), "/"), err
}

// handleSend serves the question that sends packets, for one at a time.
func (s *Server) handleSend(mux *http.ServeMux) {
	const path = pathSend + "{namespace}/{name}/{protocol}/{to}/{port}/{count}"
	mux.HandleFunc("GET "+path, alone(make(chan struct{}, 1), "packets are being sent", func(w http.ResponseWriter, r *http.Request) {
		order, err := inspection.ParseOrder([]string{r.PathValue("protocol"), r.PathValue("to"), r.PathValue("port"), r.PathValue("count")})
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		allow(w, time.Now().Add(SendWithin+time.Second))
		ctx, cancel := context.WithTimeout(r.Context(), SendWithin)
		defer cancel()
		text, err := s.send(ctx, r.PathValue("namespace"), r.PathValue("name"), order)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(text) // to somebody who may have gone
	}))
}

// send sends packets of a pod, and returns the answer.
func (s *Server) send(ctx context.Context, namespace, name string, order inspection.Order) ([]byte, error) {
	found, err := s.attachments(ctx, aboutPod(namespace, name))
	if err != nil {
		return nil, fmt.Errorf("read the record: %w", err)
	}
	i := slices.IndexFunc(found, func(a store.Allocation) bool { return !s.Gone(a) })
	if i < 0 {
		return nil, fmt.Errorf("the node knows no network of pod %s/%s", namespace, name)
	}
	sending, err := s.Send(ctx, found[i], order)
	if err != nil {
		return nil, fmt.Errorf("send packets from pod %s/%s: %w", namespace, name, err)
	}
	return inspection.Answer{
		Question: fmt.Sprintf("send %s/%s %s", namespace, name, strings.Join(order.Words(), " ")), Node: s.Node(), Sending: &sending,
		Attachments: []inspection.Attachment{}, Blocks: []inspection.Block{}, Host: []inspection.Comparison{},
	}.Write(inspection.Limit)
}
