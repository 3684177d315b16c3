package cniplugin

import (
	"encoding/binary"
	"errors"
	"maps"
	"slices"
	"strings"
)

// The messages of pkg/apis/cnirpc/cni.proto and google.rpc.Status in protobuf's wire
// format (https://protobuf.dev/programming-guides/encoding/). The generated types link
// grpc-go and reflection; tests hold this file to them.

// request is the message CNIArgs.
type request struct {
	containerID string            // 1
	netns       string            // 2
	ifName      string            // 3
	args        map[string]string // 4
	path        string            // 5
	stdinData   []byte            // 6
	ips         []string          // 7
	interfaces  map[string]bool   // 8
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
	b = appendString(b, 1, r.containerID)
	b = appendString(b, 2, r.netns)
	b = appendString(b, 3, r.ifName)
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
			entry = append(entry, 2<<3|wireVarint, 1)
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
	b = binary.AppendUvarint(b, number<<3|wireBytes)
	b = binary.AppendUvarint(b, uint64(len(value)))
	return append(b, value...)
}

// errMalformed: the bytes are no message.
var errMalformed = errors.New("malformed protobuf message")

// field is a varint or bytes field as it is on the wire.
type field struct {
	number uint64
	wire   uint64
	varint uint64
	bytes  []byte
}

// is tells whether the field has this number and type. A field of another type is
// unknown, like one of another number.
func (f field) is(number, wire uint64) bool { return f.number == number && f.wire == wire }

// fields calls yield for each varint or bytes field of a message.
func fields(b []byte, yield func(field)) error {
	for len(b) > 0 {
		tag, n := binary.Uvarint(b)
		if n <= 0 || tag>>3 == 0 || tag>>3 > 1<<29-1 {
			return errMalformed
		}
		b = b[n:]
		f := field{number: tag >> 3, wire: tag & 7}
		size := uint64(0)
		switch f.wire {
		case wireVarint:
			if f.varint, n = binary.Uvarint(b); n <= 0 {
				return errMalformed
			}
			b = b[n:]
			yield(f)
			continue
		case wireBytes:
			if size, n = binary.Uvarint(b); n <= 0 {
				return errMalformed
			}
			b = b[n:]
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
		if f.wire == wireBytes {
			f.bytes = b[:size:size]
			yield(f)
		}
		b = b[size:]
	}
	return nil
}

// unmarshalAddResponse returns the field result of an AddResponse.
func unmarshalAddResponse(b []byte) (result []byte, err error) {
	err = fields(b, func(f field) {
		if f.is(1, wireBytes) {
			result = f.bytes
		}
	})
	return result, err
}

// cniError is the message CNIError.
type cniError struct {
	code    int32
	msg     string
	details string
}

// findCNIError returns the first CNIError in the details of a serialised
// google.rpc.Status. Details of other types are foreign and are skipped.
func findCNIError(status []byte) (cniError, bool) {
	var found cniError
	ok := false
	err := fields(status, func(f field) {
		if !f.is(3, wireBytes) || ok { // details, of type google.protobuf.Any
			return
		}
		var typeURL, value []byte
		if fields(f.bytes, func(f field) {
			switch {
			case f.is(1, wireBytes):
				typeURL = f.bytes
			case f.is(2, wireBytes):
				value = f.bytes
			}
		}) != nil {
			return
		}
		url := string(typeURL)
		if url[strings.LastIndexByte(url, '/')+1:] != "pkg.cnirpc.CNIError" {
			return
		}
		e, err := unmarshalCNIError(value)
		found, ok = e, err == nil
	})
	return found, ok && err == nil
}

func unmarshalCNIError(b []byte) (cniError, error) {
	var e cniError
	err := fields(b, func(f field) {
		switch {
		case f.is(1, wireVarint):
			e.code = int32(f.varint)
		case f.is(2, wireBytes):
			e.msg = strings.ToValidUTF8(string(f.bytes), "�")
		case f.is(3, wireBytes):
			e.details = strings.ToValidUTF8(string(f.bytes), "�")
		}
	})
	return e, err
}
