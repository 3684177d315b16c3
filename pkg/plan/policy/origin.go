package policy

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// Origin is the policy by which an EndpointSlice lists clients. Its text is the annotation v2.AnnotationPolicy.
type Origin struct {
	// Namespace is empty if the policy is an EgressClusterPolicy.
	Namespace, Name string
	Created         time.Time
	// Destinations are those of the policy, sorted; nil stands for all of the Egress's.
	Destinations []netip.Prefix
}

// Bounds of an Origin, so that what others write costs nothing.
const (
	maxOrigin       = 16 << 10 // bytes
	maxDestinations = 256
	maxNamespace    = 63
	maxName         = 253
)

// originText has the fields as they are written.
type originText struct {
	Namespace    string         `json:"namespace,omitempty"`
	Name         string         `json:"name"`
	Created      string         `json:"created"`
	Destinations []netip.Prefix `json:"destinations,omitempty"`
}

// OriginOf returns the Origin of a policy.
func OriginOf(p Policy) Origin {
	o := Origin{Namespace: p.Name.Namespace, Name: p.Name.Name, Created: p.Created.UTC().Truncate(time.Second)}
	if p.Destinations != nil {
		o.Destinations = slices.SortedFunc(slices.Values(p.Destinations), netip.Prefix.Compare)
		o.Destinations = slices.Compact(o.Destinations)
	}
	return o
}

// Policy returns the name of the policy.
func (o Origin) Policy() types.NamespacedName {
	return types.NamespacedName{Namespace: o.Namespace, Name: o.Name}
}

// String returns the text.
func (o Origin) String() string {
	text, _ := json.Marshal(originText{o.Namespace, o.Name, o.Created.UTC().Format(time.RFC3339), o.Destinations}) // all of these can be written
	return string(text)
}

// ParseOrigin returns what String wrote. Every other text is an error.
func ParseOrigin(text string) (Origin, error) {
	if len(text) > maxOrigin {
		return Origin{}, fmt.Errorf("%d bytes, more than %d", len(text), maxOrigin)
	}
	var t originText
	if err := json.Unmarshal([]byte(text), &t); err != nil {
		return Origin{}, err
	}
	created, err := time.Parse(time.RFC3339, t.Created)
	switch {
	case err != nil:
		return Origin{}, fmt.Errorf("created: %w", err)
	case t.Name == "" || len(t.Name) > maxName || len(t.Namespace) > maxNamespace:
		return Origin{}, errors.New("not the name of a policy")
	case len(t.Destinations) > maxDestinations:
		return Origin{}, fmt.Errorf("%d destinations, more than %d", len(t.Destinations), maxDestinations)
	case slices.ContainsFunc(t.Destinations, func(p netip.Prefix) bool { return !p.IsValid() || p != p.Masked() }):
		return Origin{}, errors.New("destinations: not all are subnets without host bits")
	}
	o := Origin{Namespace: t.Namespace, Name: t.Name, Created: created.UTC(), Destinations: t.Destinations}
	if o.String() != text {
		return Origin{}, errors.New("not as it is written: fields that aren't known, given twice, or in another form")
	}
	return o, nil
}
