package cniplugin

import (
	"bytes"
	"math"
	"strings"
	"testing"
	"unicode/utf8"

	"google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/coil-net/coil/generated/cnirpc"
	"github.com/coil-net/coil/pkg/attachment"
)

func TestRequestIsCNIArgs(t *testing.T) {
	long := strings.Repeat("x", 1000)
	tests := []struct {
		name string
		in   request
		want *cnirpc.CNIArgs
	}{
		{"empty", request{}, &cnirpc.CNIArgs{}},
		{
			"full",
			request{
				ID: attachment.ID{ContainerID: "c", IfName: "eth0"}, netns: "/ns", args: map[string]string{"K": "v", "a": "", "": "b", "日": long},
				path: "/opt/cni/bin", stdinData: []byte{0, 0xff, 0x80}, ips: []string{"10.1.2.3", "", "fd00::1"},
				interfaces: map[string]bool{"eth0": true, "veth": false, "": true},
			},
			&cnirpc.CNIArgs{
				ContainerId: "c", Netns: "/ns", Ifname: "eth0", Args: map[string]string{"K": "v", "a": "", "": "b", "日": long},
				Path: "/opt/cni/bin", StdinData: []byte{0, 0xff, 0x80}, Ips: []string{"10.1.2.3", "", "fd00::1"},
				Interfaces: map[string]bool{"eth0": true, "veth": false, "": true},
			},
		},
		{"large", request{stdinData: bytes.Repeat([]byte("y"), 1<<20)}, &cnirpc.CNIArgs{StdinData: bytes.Repeat([]byte("y"), 1<<20)}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var got cnirpc.CNIArgs
			if err := proto.Unmarshal(tt.in.marshal(), &got); err != nil {
				t.Fatal(err)
			}
			if !proto.Equal(&got, tt.want) {
				t.Errorf("got %v, want %v", &got, tt.want)
			}
		})
	}
}

func FuzzRequest(f *testing.F) {
	f.Add("c", "/ns", "eth0", "K", "v", "/p", []byte("{}"), "10.0.0.1", "eth0", true)
	f.Fuzz(func(t *testing.T, id, netns, ifName, k, v, path string, stdin []byte, ip, iface string, sandbox bool) {
		r := request{ID: attachment.ID{ContainerID: id, IfName: ifName}, netns: netns, args: map[string]string{k: v, "x": k}, path: path,
			stdinData: stdin, ips: []string{ip}, interfaces: map[string]bool{iface: sandbox}}
		want := &cnirpc.CNIArgs{ContainerId: id, Netns: netns, Ifname: ifName, Args: r.args, Path: path,
			StdinData: stdin, Ips: r.ips, Interfaces: r.interfaces}
		if _, err := proto.Marshal(want); err != nil {
			return // not UTF-8
		}
		var got cnirpc.CNIArgs
		if err := proto.Unmarshal(r.marshal(), &got); err != nil {
			t.Fatal(err)
		}
		if !proto.Equal(&got, want) {
			t.Errorf("got %v, want %v", &got, want)
		}
	})
}

func mustMarshal(tb testing.TB, m proto.Message) []byte {
	tb.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		tb.Fatal(err)
	}
	return b
}

func mustAny(tb testing.TB, m proto.Message) *anypb.Any {
	tb.Helper()
	a, err := anypb.New(m)
	if err != nil {
		tb.Fatal(err)
	}
	return a
}

func TestAddResponse(t *testing.T) {
	for _, want := range []string{"", "x", strings.Repeat("r", 1<<20)} {
		got, err := unmarshalAddResponse(mustMarshal(t, &cnirpc.AddResponse{Result: []byte(want)}))
		if err != nil || string(got) != want {
			t.Errorf("got %d bytes, %v, want %d", len(got), err, len(want))
		}
	}
	// Fields of a later version are skipped, whatever their type.
	b := protowire.AppendTag(nil, 9, protowire.VarintType)
	b = protowire.AppendVarint(b, math.MaxUint64)
	b = protowire.AppendTag(b, 10, protowire.Fixed32Type)
	b = protowire.AppendFixed32(b, 7)
	b = protowire.AppendTag(b, 11, protowire.Fixed64Type)
	b = protowire.AppendFixed64(b, 7)
	b = protowire.AppendTag(b, 12, protowire.BytesType)
	b = protowire.AppendBytes(b, []byte("new"))
	b = protowire.AppendTag(b, 1, protowire.VarintType) // result, but no bytes
	b = protowire.AppendVarint(b, 1)
	b = append(b, mustMarshal(t, &cnirpc.AddResponse{Result: []byte("x")})...)
	if got, err := unmarshalAddResponse(b); err != nil || string(got) != "x" {
		t.Errorf("got %q, %v, want x", got, err)
	}
}

func TestFindCNIError(t *testing.T) {
	e := &cnirpc.CNIError{Code: cnirpc.ErrorCode_TRY_AGAIN_LATER, Msg: "msg", Details: "details"}
	other := &cnirpc.CNIError{Code: cnirpc.ErrorCode_INTERNAL, Msg: "second"}
	odd := mustAny(t, e)
	odd.TypeUrl = "example.com/some/path/pkg.cnirpc.CNIError"
	similar := mustAny(t, e)
	similar.TypeUrl = "type.googleapis.com/xpkg.cnirpc.CNIError"
	broken := mustAny(t, e)
	broken.Value = []byte{0xff}
	tests := []struct {
		name    string
		details []*anypb.Any
		want    cniError
		none    bool
	}{
		{name: "no details", none: true},
		{name: "one", details: []*anypb.Any{mustAny(t, e)}, want: cniError{11, "msg", "details"}},
		{name: "empty one", details: []*anypb.Any{mustAny(t, &cnirpc.CNIError{})}, want: cniError{}},
		{name: "negative code", details: []*anypb.Any{mustAny(t, &cnirpc.CNIError{Code: -5})}, want: cniError{code: -5}},
		{name: "behind foreign ones", details: []*anypb.Any{mustAny(t, wrapperspb.Bytes([]byte{1})), mustAny(t, &emptypb.Empty{}), mustAny(t, e), mustAny(t, other)},
			want: cniError{11, "msg", "details"}},
		{name: "another host in the URL", details: []*anypb.Any{odd}, want: cniError{11, "msg", "details"}},
		{name: "only foreign", details: []*anypb.Any{mustAny(t, wrapperspb.String("x"))}, none: true},
		{name: "a similar name", details: []*anypb.Any{similar}, none: true},
		{name: "broken", details: []*anypb.Any{broken}, none: true},
		{name: "broken, then good", details: []*anypb.Any{broken, mustAny(t, e)}, want: cniError{11, "msg", "details"}},
		{name: "nil", details: []*anypb.Any{{}}, none: true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, ok := findCNIError(mustMarshal(t, &status.Status{Code: 13, Message: "m", Details: tt.details}))
			if ok == tt.none || got != tt.want {
				t.Errorf("got %+v, %v, want %+v, %v", got, ok, tt.want, !tt.none)
			}
		})
	}
}

// Whatever the bytes are, decoding ends, and what the generated types accept is
// understood the same.
func FuzzUnmarshal(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte{0x0a, 0x05})
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1})
	f.Add(mustMarshal(f, &cnirpc.AddResponse{Result: []byte("result")}))
	f.Add(mustMarshal(f, &cnirpc.CNIError{Code: 11, Msg: "m", Details: "d"}))
	f.Add(mustMarshal(f, &status.Status{Code: 1, Message: "m", Details: []*anypb.Any{mustAny(f, &cnirpc.CNIError{Code: 11, Msg: "m"}), mustAny(f, &emptypb.Empty{})}}))
	// A letter that isn't UTF-8 costs nothing but the letter.
	f.Add([]byte("\x1a0\n'type.googleapis.com/pkg.cnirpc.CNIError\x12\x0500\x12\x01\xbb"))
	f.Fuzz(func(t *testing.T, b []byte) {
		result, err := unmarshalAddResponse(b)
		var want cnirpc.AddResponse
		if err == nil && proto.Unmarshal(b, &want) == nil && !bytes.Equal(result, want.Result) {
			t.Errorf("result is %q, want %q", result, want.Result)
		}
		got, err := unmarshalCNIError(b)
		var wantErr cnirpc.CNIError
		if err == nil && proto.Unmarshal(b, &wantErr) == nil && got != (cniError{int32(wantErr.Code), wantErr.Msg, wantErr.Details}) {
			t.Errorf("error is %+v, want %v", got, &wantErr)
		}
		found, ok := findCNIError(b)
		var st status.Status
		if proto.Unmarshal(b, &st) != nil || !ok {
			return
		}
		for _, d := range st.Details {
			var e cnirpc.CNIError
			err := d.UnmarshalTo(&e)
			if err == nil && found == (cniError{int32(e.Code), e.Msg, e.Details}) {
				return
			}
			if !strings.HasPrefix(d.TypeUrl, "type.googleapis.com/") || err != nil && !utf8.Valid(d.Value) {
				return // the generated types are stricter about the URL, and about text that isn't UTF-8
			}
		}
		t.Errorf("found %+v in %v", found, &st)
	})
}
