package unary

import (
	"encoding/base64"
	"fmt"
	"strconv"
	"strings"
)

// Status is why a call failed once it had been sent. It is an error.
type Status struct {
	Code    Code
	Message string
	// Details is the serialised google.rpc.Status that the server added, if any.
	Details []byte
	// FromServer: the server ended the call with this status. Otherwise the call
	// broke, and the server may have acted on it or not.
	FromServer bool
}

func (s *Status) Error() string {
	if s.Message == "" {
		return s.Code.String()
	}
	return fmt.Sprintf("%s: %s", s.Code, s.Message)
}

// broken returns the status of a call that the server didn't end.
func broken(code Code, format string, args ...any) *Status {
	return &Status{Code: code, Message: fmt.Sprintf(format, args...)}
}

// codeOfHTTP maps :status of an answer that isn't gRPC's; see
// https://github.com/grpc/grpc/blob/master/doc/http-grpc-status-mapping.md.
func codeOfHTTP(status string) Code {
	switch status {
	case "", "400":
		return Internal
	case "401":
		return Unauthenticated
	case "403":
		return PermissionDenied
	case "404":
		return Unimplemented
	case "429", "502", "503", "504":
		return Unavailable
	}
	return Unknown
}

// codeOfReset maps the error code of RST_STREAM; see "Errors" of
// https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md.
func codeOfReset(code uint32) Code {
	switch code {
	case 7: // REFUSED_STREAM
		return Unavailable
	case 8: // CANCEL
		return Canceled
	case 11: // ENHANCE_YOUR_CALM
		return ResourceExhausted
	case 12: // INADEQUATE_SECURITY
		return PermissionDenied
	}
	return Internal
}

// decodeMessage decodes the percent-encoding of grpc-message. Malformed parts stay as they are.
func decodeMessage(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '%' && i+2 < len(s) {
			if c, err := strconv.ParseUint(s[i+1:i+3], 16, 8); err == nil {
				b.WriteByte(byte(c))
				i += 2
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// decodeBinary decodes the value of a "-bin" header, padded or not. Without its
// details a status still says most of it, so garbage counts as none.
func decodeBinary(s string) []byte {
	b, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(s, "="))
	if err != nil || len(b) == 0 {
		return nil
	}
	return b
}
