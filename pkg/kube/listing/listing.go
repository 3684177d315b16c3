// Package listing reads all objects of a kind from the API server's cache, and follows them.
//
// It owns that a list takes no more memory than what is kept of its objects. It must not know what objects are for.
package listing

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
)

// Object is a pointer to an object of the API.
type Object[T any] interface {
	*T
	runtime.Object
	metav1.Object
}

// Source is where the objects of a kind are.
type Source[T any] struct {
	// Client is one of the kind's group.
	Client rest.Interface
	// Resource is such as "nodes". It is listed in all namespaces.
	Resource string
	// Selector chooses objects by their labels; empty, all.
	Selector string
	// Trim takes off an object what isn't kept of it; nil takes nothing.
	Trim func(*T)
}

// options are those of a list or a watch.
func (s Source[T]) options(o metav1.ListOptions) *metav1.ListOptions {
	o.LabelSelector = s.Selector
	return &o
}

// buffer is how much of an answer is read at once.
const buffer = 64 << 10

// Each gives keep one object after the other, by one request. The API server answers from its cache, so that the list may be a moment old. Of a whole
// list in memory, as other clients have it, nodes with their images alone would be hundreds of megabytes.
func Each[T any, P Object[T]](ctx context.Context, s Source[T], keep func(P)) error {
	_, err := list(ctx, s, metav1.ListOptions{ResourceVersion: "0"}, keep)
	return err
}

// list gives keep one object of a list after the other.
func list[T any, P Object[T]](ctx context.Context, s Source[T], o metav1.ListOptions, keep func(P)) (about metav1.ListMeta, err error) {
	body, err := s.Client.Get().Resource(s.Resource).VersionedParams(s.options(o), metav1.ParameterCodec).Stream(ctx)
	if err != nil {
		return about, err
	}
	defer func() { err = errors.Join(err, body.Close()) }()
	trimmed := func(o P) {
		if s.Trim != nil {
			s.Trim(o)
		}
		keep(o)
	}
	r := bufio.NewReaderSize(body, buffer)
	if start, peekErr := r.Peek(len(protobufPrefix)); peekErr == nil && bytes.Equal(start, protobufPrefix) {
		err = eachOfProtobuf(r, &about, trimmed)
	} else {
		err = eachOfJSON(r, &about, trimmed)
	}
	return about, err
}

// eachOfJSON reads a list as JSON.
func eachOfJSON[T any, P Object[T]](r io.Reader, about *metav1.ListMeta, keep func(P)) error {
	d := json.NewDecoder(r)
	if err := expect(d, '{'); err != nil {
		return err
	}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return err
		}
		if key != "items" {
			var other any = new(json.RawMessage)
			if key == "metadata" {
				other = about
			}
			if err := d.Decode(other); err != nil {
				return err
			}
			continue
		}
		switch t, err := d.Token(); {
		case err != nil:
			return err
		case t == nil: // no item
			continue
		case t != json.Delim('['):
			return fmt.Errorf("items of a list are %v", t)
		}
		for d.More() {
			o := P(new(T))
			if err := d.Decode(o); err != nil {
				return err
			}
			keep(o)
		}
		if err := expect(d, ']'); err != nil {
			return err
		}
	}
	return expect(d, '}')
}

// expect reads a delimiter.
func expect(d *json.Decoder, want json.Delim) error {
	t, err := d.Token()
	if errors.Is(err, io.EOF) { // what has begun must end
		err = io.ErrUnexpectedEOF
	}
	if err == nil && t != want {
		err = fmt.Errorf("a list has %v instead of %v", t, want)
	}
	return err
}
