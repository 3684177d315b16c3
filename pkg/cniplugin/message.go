package cniplugin

import (
	"encoding/binary"
	"errors"
	"maps"
	"slices"
	"strings"

	"github.com/coil-net/coil/pkg/attachment"
)

// The messages of pkg/apis/cnirpc/cni.proto and google.rpc.Status in protobuf's wire
// format (https://protobuf.dev/programming-guides/encoding/). The generated types link
// grpc-go and reflection; tests hold this file to them. Package protowire makes 20 system
// calls when a program starts, to read samples of its file.

// request is the message CNIArgs.
type request struct {
	attachment.ID                   // 1 and 3
	netns         string            // 2
	args          map[string]string // 4
	path          string            // 5
	stdinData     []byte            // 6
	ips           []string          // 7
	interfaces    map[string]bool   // 8
}

// Types of fields on the wire.
const (
	wireVarint  = 0
	wireFixed64 = 1
	wireBytes   = 2
	wireFixed32 = 5
)

// marshal encodes the message; the order of maps is that of their keys.
func (r request) marshal() []byte {
	b := make([]byte, 0, 512+len(r.stdinData))
	b = appendString(b, 1, r.ContainerID)
	b = appendString(b, 2, r.netns)
	b = appendString(b, 3, r.IfName)
	for _, k := range slices.Sorted(maps.Keys(r.args)) {
		b = appendField(b, 4, appendString(appendString(nil, 1, k), 2, r.args[k]))
	}
	b = appendString(b, 5, r.path)
	b = appendString(b, 6, string(r.stdinData))
	for _, ip := range r.ips {
		b = appendField(b, 7, []byte(ip))
	}
	for _, k := range slices.Sorted(maps.Keys(r.interfaces)) {
		entry := appendString(nil, 1, k)
		if r.interfaces[k] {
			entry = append(entry, byte(tag(2, wireVarint)), 1)
		}
		b = appendField(b, 8, entry)
	}
	return b
}

// appendString appends a string or bytes field unless it has the default value.
func appendString(b []byte, number uint64, s string) []byte {
	if s == "" {
		return b
	}
	return appendField(b, number, []byte(s))
}

func appendField(b []byte, number uint64, value []byte) []byte {
	b = binary.AppendUvarint(b, tag(number, wireBytes))
	b = binary.AppendUvarint(b, uint64(len(value)))
	return append(b, value...)
}

// tag is the beginning of a field. A field of another type than is expected is unknown,
// like one of another number.
func tag(number, wire uint64) uint64 { return number<<3 | wire }

// errMalformed: the bytes are no message.
var errMalformed = errors.New("malformed protobuf message")

// field is a field as it is on the wire.
type field struct {
	tag    uint64
	varint uint64 // of a varint field
	bytes  []byte // of all others
}

// fields calls yield for each field of a message.
func fields(b []byte, yield func(field)) error {
	for len(b) > 0 {
		var f field
		var n int
		if f.tag, n = binary.Uvarint(b); n <= 0 || f.tag>>3 == 0 || f.tag>>3 > 1<<29-1 {
			return errMalformed
		}
		b = b[n:]
		size := uint64(0)
		switch wire := f.tag & 7; wire {
		case wireVarint, wireBytes:
			if f.varint, n = binary.Uvarint(b); n <= 0 {
				return errMalformed
			}
			b = b[n:]
			if wire == wireBytes {
				size = f.varint
			}
		case wireFixed64:
			size = 8
		case wireFixed32:
			size = 4
		default: // groups, which proto3 doesn't have
			return errMalformed
		}
		if size > uint64(len(b)) {
			return errMalformed
		}
		f.bytes, b = b[:size:size], b[size:]
		yield(f)
	}
	return nil
}

// last returns the fields of a message by their tags. Of a repeated field the last one counts.
func last(b []byte) (map[uint64]field, error) {
	m := map[uint64]field{}
	err := fields(b, func(f field) { m[f.tag] = f })
	return m, err
}

// unmarshalAddResponse returns the field result of an AddResponse.
func unmarshalAddResponse(b []byte) (result []byte, err error) {
	response, err := last(b)
	return response[tag(1, wireBytes)].bytes, err
}

// cniError is the message CNIError.
type cniError struct {
	code    int32
	msg     string
	details string
}

// findCNIError returns the first CNIError in the details of a serialised
// google.rpc.Status. Details of other types are foreign and are skipped.
func findCNIError(status []byte) (found cniError, ok bool) {
	err := fields(status, func(f field) {
		if f.tag != tag(3, wireBytes) || ok { // details, of type google.protobuf.Any
			return
		}
		detail, err := last(f.bytes)
		url := string(detail[tag(1, wireBytes)].bytes)
		if err == nil && url[strings.LastIndexByte(url, '/')+1:] == "pkg.cnirpc.CNIError" {
			found, err = unmarshalCNIError(detail[tag(2, wireBytes)].bytes)
			ok = err == nil
		}
	})
	return found, ok && err == nil
}

func unmarshalCNIError(b []byte) (cniError, error) {
	e, err := last(b)
	text := func(number uint64) string { return strings.ToValidUTF8(string(e[tag(number, wireBytes)].bytes), "�") }
	return cniError{int32(e[tag(1, wireVarint)].varint), text(2), text(3)}, err
}
