package coild

import (
	"context"
	"errors"
	"maps"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/node/floating"
	"github.com/coil-net/coil/pkg/node/floating/place"
	"github.com/coil-net/coil/pkg/store"
)

// A router whose link can't be looked up now doesn't keep others from being reached. It is reached as before, until it is known that it isn't.
func TestReachOthers(t *testing.T) {
	c := &chained{}
	router := func(uid string) store.Client {
		return store.Client{Sandbox: store.Sandbox{Pod: store.Pod{Namespace: "internet", Name: uid, UID: uid}}}
	}
	routers := []store.Client{router("a"), router("b")}
	busy := errors.New("device or resource busy")
	for _, s := range []struct {
		when    string
		links   map[string]int
		errs    map[string]error
		want    map[types.UID]place.Pod
		unknown string
	}{
		{"at the start", map[string]int{"b": 2}, map[string]error{"a": busy}, map[types.UID]place.Pod{"b": {Link: 2}}, "a"},
		{"both are known", map[string]int{"a": 1, "b": 2}, nil, map[types.UID]place.Pod{"a": {Link: 1}, "b": {Link: 2}}, ""},
		{"one isn't, and the other has a new link", map[string]int{"b": 3}, map[string]error{"a": busy}, map[types.UID]place.Pod{"a": {Link: 1}, "b": {Link: 3}}, "a"},
		{"still", map[string]int{"b": 3}, map[string]error{"a": busy}, map[types.UID]place.Pod{"a": {Link: 1}, "b": {Link: 3}}, "a"},
		{"it is gone", map[string]int{"b": 3}, map[string]error{"a": netns.ErrNotExist}, map[types.UID]place.Pod{"b": {Link: 3}}, ""},
		{"it isn't known again", map[string]int{"b": 3}, map[string]error{"a": busy}, map[types.UID]place.Pod{"b": {Link: 3}}, "a"},
	} {
		got, unknown := c.reach(t.Context(), routers, func(_ context.Context, b store.Sandbox) (place.Pod, error) {
			return place.Pod{Link: s.links[b.UID]}, s.errs[b.UID]
		})
		if !maps.Equal(got, s.want) {
			t.Errorf("%s: %v are reached, want %v", s.when, got, s.want)
		}
		h := &holder{unknown: unknown}
		if err := h.unknownPods(); (err == nil) != (s.unknown == "") || err != nil && !strings.Contains(err.Error(), "internet/"+s.unknown) {
			t.Errorf("%s: the error is %v, want one about %q", s.when, err, s.unknown)
		}
	}
}

// Of an address whose router isn't known now it isn't said that it has none: its node would give it up.
func TestUnknownPodsAreNotGone(t *testing.T) {
	h := &holder{pods: map[types.UID]place.Pod{}, unknown: map[types.UID]error{"a": errors.New("busy")}}
	for uid, want := range map[types.UID]bool{"a": false, "b": true} {
		if ready, known := h.Ready(floating.Address{Pod: uid}); ready || known != want {
			t.Errorf("router %s: ready %t, known %t, want %t", uid, ready, known, want)
		}
	}
}
