// Package debug answers what people ask coild about a pod, an address or the node.
//
// It owns the socket of these questions, and the limits of an answer: its size, its time, and how many are made at once. Nothing is changed by a question, and while nobody
// asks nothing is done. One question has a few packets sent from a pod. It must not know what objects there are in the kernel, nor what follows from an answer.
package debug

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"slices"
	"time"

	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/observe"
	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/store"
)

// Within is how long coild looks before it answers with what it has found by then.
const Within = 1500 * time.Millisecond

// atOnce is how many answers are made at once. Others have to ask again.
const atOnce = 4

// Record is the node's record of addresses; see package store.
type Record interface {
	List(ctx context.Context) ([]store.Allocation, error)
	Usage(ctx context.Context) ([]store.Usage, error)
	ListClients(ctx context.Context) ([]store.Client, error)
	// Contents is all that is written in the record.
	Contents(ctx context.Context) (inspection.Database, error)
}

// Server implements the package's task.
type Server struct {
	// Node says which node this is, and whether it works.
	Node   func() inspection.Node
	Record Record
	// Gone says that the network namespace that an attachment was made in isn't there any more.
	Gone func(store.Allocation) bool
	// Look adds to an attachment what is there in the kernel.
	Look func(ctx context.Context, alloc store.Allocation, into *inspection.Attachment)
	// LookAtHost compares what pods of the node share.
	LookAtHost func(ctx context.Context) []inspection.Comparison
	// LookAtAddress compares what the node has for a floating address of Services that is to be on nodes; nothing for others.
	LookAtAddress func(ctx context.Context, a netip.Addr) []inspection.Comparison
	// Follow is how packets of a pod go to an address.
	Follow func(ctx context.Context, alloc store.Allocation, to netip.Addr) ([]inspection.Hop, error)
	// Send sends packets from a pod.
	Send func(ctx context.Context, alloc store.Allocation, o inspection.Order) (inspection.Sending, error)
	// Way is how the node reaches an address.
	Way func(ctx context.Context, a netip.Addr) (string, error)
	// Copy returns a copy of the file of the record, with its size; see sqlite.Store.Copy.
	Copy func(ctx context.Context, limit int64) (io.ReadCloser, int64, error)
}

// Serve answers at a unix socket until ctx ends.
func (s *Server) Serve(ctx context.Context, socket string) error {
	return observe.ServeSocket(ctx, socket, Within, s.handler())
}

// handler has a path for each question; see Path.
func (s *Server) handler() http.Handler {
	all := observe.NewQuestions(atOnce, Within)
	answer := func(path string, find func(r *http.Request) (question, error)) {
		all.Answer(path, func(r *http.Request) (func(context.Context) ([]byte, error), error) {
			q, err := find(r)
			return func(ctx context.Context) ([]byte, error) { return s.answer(ctx, q).Write(inspection.Limit) }, err
		})
	}
	answer("/node", func(*http.Request) (question, error) { return aboutNode(), nil })
	answer("/pod/{namespace}/{name}", func(r *http.Request) (question, error) {
		return aboutPod(r.PathValue("namespace"), r.PathValue("name")), nil
	})
	answer("/way/{namespace}/{name}/{to}", func(r *http.Request) (question, error) {
		q := aboutPod(r.PathValue("namespace"), r.PathValue("name"))
		var err error
		q.to, err = netip.ParseAddr(r.PathValue("to"))
		q.text = fmt.Sprintf("way %s/%s %s", r.PathValue("namespace"), r.PathValue("name"), q.to)
		return q, err
	})
	answer("/address/{address}", func(r *http.Request) (question, error) { return aboutAddress(r.PathValue("address")) })
	mux := http.NewServeMux()
	mux.Handle("/", all)
	s.handleRecord(mux)
	s.handleSend(mux)
	return mux
}

// Path is the path of a question that words ask: "node", "pod NAMESPACE/NAME", "address ADDRESS", "way NAMESPACE/NAME ADDRESS", "send NAMESPACE/NAME PROTOCOL ADDRESS PORT COUNT",
// "record" or "db".
func Path(words []string) (string, error) {
	switch {
	case len(words) == 1 && slices.Contains([]string{"/node", PathRecord, PathDB}, "/"+words[0]):
		return "/" + words[0], nil
	case len(words) == 2 && words[0] == "pod":
		return inspection.PodPath("/pod/", words[1])
	case len(words) == 3 && words[0] == "way":
		path, err := inspection.PodPath("/way/", words[1])
		a, e := netip.ParseAddr(words[2])
		return path + "/" + a.WithZone("").String(), errors.Join(err, e)
	case len(words) == 6 && words[0] == "send":
		return sendPath(words[1:])
	case len(words) == 2 && words[0] == "address":
		a, err := netip.ParseAddr(words[1])
		return "/address/" + a.WithZone("").String(), err
	}
	return "", errors.New("ask for pod NAMESPACE/NAME, for address ADDRESS, for way NAMESPACE/NAME ADDRESS, for send NAMESPACE/NAME PROTOCOL ADDRESS PORT COUNT, for node, for record or for db")
}

// question says what an answer is about.
type question struct {
	text string
	// attachment and block select what it is about.
	attachment func(store.Allocation) bool
	block      func(store.Usage, []store.Allocation) bool
	// brief leaves out what is as it should be.
	brief   bool
	address netip.Addr
	// to is where packets of the pod are to go; not valid if nobody asks.
	to netip.Addr
}

func aboutNode() question {
	return question{
		text: "node", brief: true,
		attachment: func(store.Allocation) bool { return true }, block: func(store.Usage, []store.Allocation) bool { return true },
	}
}

func aboutPod(namespace, name string) question {
	return question{
		text:       "pod " + namespace + "/" + name,
		attachment: func(a store.Allocation) bool { return a.Namespace == namespace && a.Name == name },
		block: func(u store.Usage, found []store.Allocation) bool {
			// Of a pod without an address it is asked whether there is one left.
			return len(found) == 0 || slices.ContainsFunc(found, func(a store.Allocation) bool { return a.Block == u.Name })
		},
	}
}

func aboutAddress(text string) (question, error) {
	addr, err := netip.ParseAddr(text)
	return question{
		text: "address " + text, address: addr,
		attachment: func(a store.Allocation) bool { return slices.Contains(a.Address.Addrs(), addr) },
		block: func(u store.Usage, _ []store.Allocation) bool {
			return slices.ContainsFunc(u.Prefixes(), func(p netip.Prefix) bool { return p.Contains(addr) })
		},
	}, err
}

// answer finds everything out, as far as there is time.
func (s *Server) answer(ctx context.Context, q question) inspection.Answer {
	a := inspection.Answer{Question: q.text, Node: s.Node(), Attachments: []inspection.Attachment{}, Blocks: []inspection.Block{}, Host: []inspection.Comparison{}}
	problem := func(what string, err error) {
		if err != nil {
			a.Problems = append(a.Problems, what+": "+err.Error())
		}
	}
	found, err := s.attachments(ctx, q)
	problem("read the record", err)
	usage, err := s.Record.Usage(ctx)
	problem("read the blocks of the record", err)
	for _, u := range usage {
		if q.block(u, found) {
			a.Blocks = append(a.Blocks, inspection.Block{
				Name: u.Name, Pool: u.Pool, Ranges: u.Block.Block.String(), Size: u.Size(), Allocated: u.Allocated, Cooling: u.Cooling,
			})
		}
	}
	a.Host = s.LookAtHost(ctx)
	if q.address.IsValid() {
		a.Way, err = s.Way(ctx, q.address)
		problem("look up the way to "+q.address.String(), err)
		a.Address = s.LookAtAddress(ctx, q.address)
	}
	if i := slices.IndexFunc(found, func(a store.Allocation) bool { return !s.Gone(a) }); q.to.IsValid() && i >= 0 {
		a.Hops, err = s.Follow(ctx, found[i], q.to)
		problem("follow packets to "+q.to.String(), err)
	}
	for i, alloc := range found {
		if ctx.Err() != nil {
			problem(fmt.Sprintf("look at %d of %d attachments", len(found)-i, len(found)), fmt.Errorf("not done within %s", Within))
			break
		}
		a.Attachments = append(a.Attachments, s.describe(ctx, q, alloc))
	}
	return a
}

// attachments are those that a question is about. Where coild gives no addresses they are in the record of clients.
func (s *Server) attachments(ctx context.Context, q question) ([]store.Allocation, error) {
	all, err := s.Record.List(ctx)
	if err != nil {
		return nil, err
	}
	clients, err := s.Record.ListClients(ctx)
	for _, c := range clients {
		if !slices.ContainsFunc(all, func(a store.Allocation) bool { return a.ID == c.ID }) {
			all = append(all, store.Allocation{ID: c.ID, Pod: c.Pod, Netns: c.Netns, Address: c.Address})
		}
	}
	found := slices.DeleteFunc(all, func(a store.Allocation) bool { return !q.attachment(a) })
	slices.SortFunc(found, func(a, b store.Allocation) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name), a.Since.Compare(b.Since))
	})
	return found, err
}

// describe says what there is of an attachment.
func (s *Server) describe(ctx context.Context, q question, alloc store.Allocation) inspection.Attachment {
	a := inspection.Attachment{Record: inspection.Record{
		ContainerID: alloc.ContainerID, IfName: alloc.IfName, Namespace: alloc.Namespace, Pod: alloc.Name, PodUID: alloc.UID,
		State: string(alloc.State), Pool: alloc.Pool, Block: alloc.Block, Addresses: texts(alloc.Address),
		Netns: alloc.Path, NetnsGone: s.Gone(alloc), HostLink: alloc.HostIfName, HostIndex: alloc.HostIfIndex, Since: alloc.Since,
	}}
	s.Look(ctx, alloc, &a)
	if q.brief || a.Objects == nil {
		a.Objects = inspection.Wrong(a.Objects)
	}
	return a
}

func texts(a ipam.Address) []string {
	all := []string{}
	for _, x := range a.Addrs() {
		all = append(all, x.String())
	}
	return all
}
