package listing

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// protobufPrefix is what protobuf of the API begins with. A message runtime.Unknown follows, which contains that of the list.
var protobufPrefix = []byte("k8s\x00")

// Fields of these messages, which are part of the API (k8s.io/apimachinery/pkg/runtime/generated.proto, and the lists of all groups).
const (
	unknownRaw = 2
	listMeta   = 1
	listItems  = 2
)

// maxItem bounds an item: etcd has none that is larger.
const maxItem = 64 << 20

// eachOfProtobuf reads a list as protobuf.
func eachOfProtobuf[T any, P Object[T]](r *bufio.Reader, about *metav1.ListMeta, keep func(P)) error {
	if _, err := r.Discard(len(protobufPrefix)); err != nil {
		return err
	}
	var item []byte
	there := false
	err := fields(r, func(field, length uint64) error {
		if field != unknownRaw {
			return skip(r, length)
		}
		there = true
		limited := &io.LimitedReader{R: r, N: int64(length)}
		body := bufio.NewReaderSize(limited, buffer)
		err := fields(body, func(field, length uint64) error {
			if field != listMeta && field != listItems {
				return skip(body, length)
			}
			if length > maxItem {
				return fmt.Errorf("an item of a list has %d bytes", length)
			}
			if uint64(cap(item)) < length {
				item = make([]byte, length)
			}
			item = item[:length]
			if _, err := io.ReadFull(body, item); err != nil {
				return whole(err)
			}
			if field == listMeta {
				return about.Unmarshal(item)
			}
			o := P(new(T))
			m, ok := any(o).(interface{ Unmarshal([]byte) error })
			if !ok {
				return fmt.Errorf("%T has no protobuf", o)
			}
			if err := m.Unmarshal(item); err != nil { // it keeps nothing of the bytes
				return err
			}
			keep(o)
			return nil
		})
		if err == nil && limited.N > 0 {
			return io.ErrUnexpectedEOF
		}
		return err
	})
	if err == nil && !there {
		return io.ErrUnexpectedEOF
	}
	return err
}

// fields calls with for each field of a message that has a length: lists have no others that matter. It is to read that many bytes.
func fields(r *bufio.Reader, with func(field, length uint64) error) error {
	for {
		if _, err := r.Peek(1); errors.Is(err, io.EOF) {
			return nil
		}
		tag, err := binary.ReadUvarint(r)
		if err != nil {
			return whole(err)
		}
		switch wire := tag & 7; wire {
		case 0:
			_, err = binary.ReadUvarint(r)
			err = whole(err)
		case 1:
			err = skip(r, 8)
		case 5:
			err = skip(r, 4)
		case 2:
			var length uint64
			if length, err = binary.ReadUvarint(r); err != nil {
				return whole(err)
			}
			err = with(tag>>3, length)
		default:
			err = fmt.Errorf("a list has a field of wire type %d", wire)
		}
		if err != nil {
			return err
		}
	}
}

// skip leaves out bytes.
func skip(r io.Reader, n uint64) error {
	_, err := io.CopyN(io.Discard, r, int64(n))
	return whole(err)
}

// whole makes an end within a message an error that isn't taken for the end of all.
func whole(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
