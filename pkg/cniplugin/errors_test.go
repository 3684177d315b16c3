package cniplugin

import (
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/coil-net/coil/generated/cnirpc"
	"github.com/coil-net/coil/pkg/cniplugin/unary"
)

func TestToCNIError(t *testing.T) {
	withDetails := func(code unary.Code, details ...*anypb.Any) error {
		return &unary.Status{Code: code, Message: "status message", FromServer: true,
			Details: mustMarshal(t, &status.Status{Code: int32(code), Message: "status message", Details: details})}
	}
	cni := func(code cnirpc.ErrorCode, msg, details string) *anypb.Any {
		return mustAny(t, &cnirpc.CNIError{Code: code, Msg: msg, Details: details})
	}
	plain := func(code unary.Code) error { return &unary.Status{Code: code, Message: "why", FromServer: true} }
	noConn := &unary.ConnectError{Err: syscall.ECONNREFUSED}

	tests := []struct {
		name string
		err  error
		// code is for all commands but STATUS, statusCode for that if it differs.
		code, statusCode uint
		// message must be part of the message, details of the details.
		message, details string
	}{
		{name: "no connection", err: noConn, code: 11, statusCode: 50,
			message: "coild is not reachable at /s: connection refused; it is probably starting or being updated; " +
				"see kubectl -n kube-system get pods -l app.kubernetes.io/component=coild"},
		{name: "broken connection", err: &unary.Status{Code: unary.Unavailable, Message: "EOF"}, code: 11, statusCode: 50,
			message: "broke off", details: "EOF"},
		{name: "no answer in time", err: &unary.Status{Code: unary.DeadlineExceeded}, code: 11, statusCode: 50, message: "did not answer"},
		{name: "deadline in coild", err: plain(unary.DeadlineExceeded), code: 11, statusCode: 50, message: "did not answer", details: "why"},
		{name: "not available", err: plain(unary.Unavailable), code: 11, statusCode: 50, message: "coild is not available: why"},
		{name: "coild stops", err: plain(unary.Canceled), code: 11, statusCode: 50, message: "coild is not available: why"},
		{name: "not available without a reason", err: &unary.Status{Code: unary.Unavailable, FromServer: true}, code: 11, statusCode: 50, message: "gave no reason"},
		{name: "unimplemented", err: plain(unary.Unimplemented), code: 999, message: "another version"},
		{name: "internal", err: plain(unary.Internal), code: 999, message: "Internal: why"},
		{name: "unknown", err: plain(unary.Unknown), code: 999, message: "Unknown: why"},
		{name: "code of a later gRPC", err: plain(77), code: 999, message: "Code(77): why"},
		{name: "not even a status", err: errors.New("odd"), code: 999, message: "odd"},
		{name: "wrapped", err: fmt.Errorf("call: %w", plain(unary.Unavailable)), code: 11, statusCode: 50, message: "why"},

		{name: "CNIError try again", err: withDetails(unary.Internal, cni(cnirpc.ErrorCode_TRY_AGAIN_LATER, "no block", "pool p")),
			code: 11, statusCode: 50, message: "no block", details: "pool p"},
		{name: "CNIError in an Unavailable", err: withDetails(unary.Unavailable, cni(cnirpc.ErrorCode_INVALID_NETWORK_CONFIG, "bad", "")), code: 7, message: "bad"},
		{name: "CNIError plugin not available", err: withDetails(unary.Unavailable, cni(cnirpc.ErrorCode_PLUGIN_NOT_AVAILABLE, "starting", "")), code: 50, message: "starting"},
		{name: "CNIError limited connectivity", err: withDetails(unary.Unavailable, cni(cnirpc.ErrorCode_LIMITED_CONNECTIVITY, "lost", "")), code: 51, message: "lost"},
		{name: "CNIError unknown container", err: withDetails(unary.Code(codes.NotFound), cni(cnirpc.ErrorCode_UNKNOWN_CONTAINER, "c", "")), code: 3, message: "c"},
		{name: "CNIError without a code", err: withDetails(unary.Internal, cni(0, "m", "d")), code: 999, message: "m", details: "d"},
		{name: "CNIError with a negative code", err: withDetails(unary.Internal, cni(-1, "m", "")), code: 999, message: "m"},
		{name: "CNIError with a code of a later coild", err: withDetails(unary.Internal, cni(123, "m", "")), code: 123, message: "m"},
		{name: "CNIError without a message", err: withDetails(unary.Internal, cni(5, "", "")), code: 5, message: "gave no reason (Internal)"},
		{name: "foreign details", err: withDetails(unary.Internal, mustAny(t, wrapperspb.String("x"))), code: 999, message: "Internal: status message"},
		{name: "foreign details of an Unavailable", err: withDetails(unary.Unavailable, mustAny(t, wrapperspb.String("x"))), code: 11, statusCode: 50, message: "status message"},
		{name: "garbage for details", err: &unary.Status{Code: unary.Internal, Message: "why", Details: []byte{0xff}, FromServer: true}, code: 999, message: "why"},
		{name: "message that is no UTF-8", err: &unary.Status{Code: unary.Internal, Message: "a\xffb", FromServer: true}, code: 999, message: "a�b"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			for v := range verbs {
				want := tt.code
				if v == verbStatus && tt.statusCode != 0 {
					want = tt.statusCode
				}
				got := toCNIError(v, "/s", tt.err)
				if got.Code != want || !strings.Contains(got.Msg, tt.message) || !strings.Contains(got.Details, tt.details) {
					t.Errorf("%s: got code %d, %q, %q, want %d, %q, %q", v, got.Code, got.Msg, got.Details, want, tt.message, tt.details)
				}
			}
		})
	}
}

func TestLost(t *testing.T) {
	tests := []struct {
		name string
		err  error
		want bool
	}{
		{"no connection", &unary.ConnectError{Err: syscall.ENOENT}, true},
		{"broken connection", &unary.Status{Code: unary.Unavailable}, true},
		{"no answer in time", &unary.Status{Code: unary.DeadlineExceeded}, false},
		{"coild says it isn't available", &unary.Status{Code: unary.Unavailable, FromServer: true}, false},
		{"coild says anything else", &unary.Status{Code: unary.Internal, FromServer: true}, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := lost(tt.err); got != tt.want {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}

// Details come from another process: whatever they are, the result is a CNI error
// that the runtime takes for one.
func FuzzToCNIError(f *testing.F) {
	f.Add(uint32(13), "message", []byte{0x1a, 0x02, 0x0a, 0x00})
	f.Add(uint32(14), "", mustMarshal(f, &status.Status{Details: []*anypb.Any{mustAny(f, &cnirpc.CNIError{Code: -1})}}))
	f.Fuzz(func(t *testing.T, code uint32, message string, details []byte) {
		for v := range verbs {
			e := toCNIError(v, "/s", &unary.Status{Code: unary.Code(code), Message: message, Details: details, FromServer: true})
			if e.Code == 0 || e.Msg == "" {
				t.Errorf("%s: got %+v", v, e)
			}
		}
	})
}
