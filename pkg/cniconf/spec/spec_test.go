package spec_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/types/create"
	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/cniconf/spec"
)

// decode is what encoding/json makes of a text.
func decode(t *testing.T, text []byte) any {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(string(text)))
	d.UseNumber()
	var v any
	if err := d.Decode(&v); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return v
}

func TestNestingIsBounded(t *testing.T) {
	_, err := spec.ParseConf([]byte(`{"x":` + strings.Repeat("[", 1<<20)))
	if err == nil || !strings.Contains(err.Error(), "depth") {
		t.Errorf("error is %v", err)
	}
}

// encoding/json takes names of other cases for those of a struct's fields.
func TestNamesHaveACase(t *testing.T) {
	conf, err := spec.ParseConf([]byte(`{"socket":"/s","SOCKET":"x","PrevResult":1,"Name":2}`))
	if err != nil || conf.Socket != "/s" || conf.PrevResult != nil || conf.Name != "" {
		t.Errorf("configuration %+v, %v", conf, err)
	}
	if list, err := spec.ValidAttachments([]byte(`{"CNI.dev/attachments":[]}`)); err == nil {
		t.Errorf("attachments %v", list)
	}
	if list, err := spec.ValidAttachments([]byte(`{"cni.dev/attachments":[{"containerid":"c","ifName":"eth0"}]}`)); err == nil {
		t.Errorf("attachments %v", list)
	}
	const text = `{"cniVersion":"1.1.0","CNIVersion":"9.0.0","IPS":[{}],"Interfaces":1,"interfaces":[{"name":"a","Sandbox":1}]}`
	r, err := spec.ParseResult([]byte(text), "")
	if err != nil || len(r.Addresses) > 0 || len(r.Interfaces) != 1 || r.Interfaces[0] != (spec.Interface{Name: "a"}) {
		t.Errorf("result %+v, %v", r, err)
	}
}

// Unknown members of a result are passed on, with their numbers digit by digit.
func TestUnknownMembersOfResults(t *testing.T) {
	const unknown = `"z":{"a":[12345678901234567890,1.50,null]}`
	r, err := spec.ParseResult([]byte(`{"cniVersion":"1.0.0","ips":[{"address":"10.1.0.1/32",`+unknown+`}],`+unknown+`}`), "")
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"cniVersion":"0.4.0","ips":[{"address":"10.1.0.1/32","version":"4",` + unknown + `}],` + unknown + `}`
	if d := cmp.Diff(want, string(r.As("0.4.0"))); d != "" {
		t.Errorf("as 0.4.0 (-want +got):\n%s", d)
	}
}

func TestErrorIsThatOfTheLibrary(t *testing.T) {
	for _, e := range []*spec.Error{
		spec.NewError(7, "no \"good\"\n", "a <b>"),
		spec.NewError(spec.CodeInternal, "plain", ""),
	} {
		var got types.Error
		if err := json.Unmarshal(e.JSON(), &got); err != nil {
			t.Fatalf("%s: %v", e.JSON(), err)
		}
		if want := *types.NewError(e.Code, e.Msg, e.Details); got != want || e.Error() != want.Error() {
			t.Errorf("%+v came back as %+v; printed %q, want %q", want, got, e.Error(), want.Error())
		}
	}
	codes := map[uint]uint{
		spec.CodeIncompatibleVersion: types.ErrIncompatibleCNIVersion, spec.CodeInvalidEnvironment: types.ErrInvalidEnvironmentVariables,
		spec.CodeIOFailure: types.ErrIOFailure, spec.CodeDecodingFailure: types.ErrDecodingFailure,
		spec.CodeInvalidConfig: types.ErrInvalidNetworkConfig, spec.CodeInvalidNetns: types.ErrInvalidNetNS,
		spec.CodeTryAgainLater: types.ErrTryAgainLater, spec.CodeNotAvailable: types.ErrPluginNotAvailable, spec.CodeInternal: types.ErrInternal,
	}
	for ours, theirs := range codes {
		if ours != theirs {
			t.Errorf("code %d is %d in the library", ours, theirs)
		}
	}
}

func TestSince(t *testing.T) {
	for _, tt := range []struct {
		version, first string
		want           bool
	}{{"0.3.1", "0.4.0", false}, {"0.4.0", "0.4.0", true}, {"1.1.0", "0.4.0", true}, {"1.0.0", "1.1.0", false}} {
		if got := spec.Since(tt.version, tt.first); got != tt.want {
			t.Errorf("Since(%s, %s) is %v", tt.version, tt.first, got)
		}
	}
}

const (
	result110 = `{"cniVersion":"1.1.0","interfaces":[{"name":"veth1","mac":"02:00:00:00:00:02","mtu":1400,"socketPath":"/s","pciID":"1"},` +
		`{"name":"eth0","mac":"02:00:00:00:00:01","mtu":1400,"sandbox":"/ns"}],` +
		`"ips":[{"interface":1,"address":"10.1.0.1/32","gateway":"169.254.1.1"},{"interface":1,"address":"fd01::1/128"}],` +
		`"routes":[{"dst":"0.0.0.0/0","gw":"169.254.1.1","mtu":1300,"priority":1},{"dst":"::/0"}],"dns":{"nameservers":["10.0.0.1"]}}`
	result040 = `{"cniVersion":"0.4.0","interfaces":[{"name":"eth0","sandbox":"/ns"}],` +
		`"ips":[{"version":"4","interface":0,"address":"10.1.0.1/32"},{"version":"6","address":"fd01::1/128","gateway":"fe80::1"}],"routes":null}`
	unversioned = `{"ips":[{"version":"4","address":"10.1.0.1/32"}]}`
)

// library is a result as the CNI project's library converts it, and what it means.
func library(t *testing.T, text, of, as string) (any, error) {
	t.Helper()
	if !strings.Contains(text, "cniVersion") {
		text = strings.Replace(text, "{", `{"cniVersion":"`+of+`",`, 1)
	}
	v, err := create.DecodeVersion([]byte(text))
	if err != nil {
		return nil, err
	}
	r, err := create.Create(v, []byte(text))
	if err != nil {
		return nil, err
	}
	return as100(t, r, as)
}

// as100 is the meaning of a result in a version.
func as100(t *testing.T, r types.Result, as string) (any, error) {
	t.Helper()
	converted, err := r.GetAsVersion(as)
	if err != nil {
		return nil, err
	}
	b, err := json.Marshal(converted)
	if err != nil {
		t.Fatal(err)
	}
	return decode(t, b), nil
}

// Texts for the runtime mean the same as the library's.
func TestResultsAreThoseOfTheLibrary(t *testing.T) {
	for name, text := range map[string]string{
		"1.1.0": result110, "1.0.0": strings.Replace(result110, "1.1.0", "1.0.0", 1), "0.4.0": result040,
		"0.3.0": strings.Replace(result040, "0.4.0", "0.3.0", 1), "unversioned": unversioned, "nothing": `{"cniVersion":"1.1.0"}`,
	} {
		for _, version := range spec.Versions() {
			t.Run(name+" as "+version, func(t *testing.T) {
				r, err := spec.ParseResult([]byte(text), "0.4.0")
				if err != nil {
					t.Fatal(err)
				}
				out := r.As(version)
				if name == version && string(out) != text {
					t.Errorf("a result that needn't be converted was changed to %s", out)
				}
				got, err := library(t, string(out), version, version)
				if err != nil {
					t.Fatalf("the library doesn't understand %s: %v", out, err)
				}
				want, err := library(t, text, "0.4.0", version)
				if err != nil {
					t.Fatal(err)
				}
				if d := cmp.Diff(want, got); d != "" {
					t.Errorf("as the library reads it (-want +got):\n%s\nwritten was %s", d, out)
				}
			})
		}
	}
}

func TestParseResult(t *testing.T) {
	r, err := spec.ParseResult([]byte(result110), "")
	if err != nil {
		t.Fatal(err)
	}
	ref, err := types100.NewResult([]byte(result110))
	if err != nil {
		t.Fatal(err)
	}
	want := ref.(*types100.Result)
	for i, got := range r.Interfaces {
		if w := want.Interfaces[i]; got != (spec.Interface{Name: w.Name, Sandbox: w.Sandbox}) {
			t.Errorf("interface %+v, the library's is %+v", got, w)
		}
	}
	for i, got := range r.Addresses {
		if w := want.IPs[i]; got != (spec.Address{IP: w.Address.IP.String(), Interface: *w.Interface}) {
			t.Errorf("address %+v, the library's is %+v", got, w)
		}
	}
	if len(r.Interfaces) != 2 || len(r.Addresses) != 2 {
		t.Errorf("result %+v", r)
	}
	for _, bad := range []string{
		`null`, `[]`, `1`, `{"cniVersion":"9.0.0"}`, `{"cniVersion":"0.2.0"}`, `{"cniVersion":1}`, `{"ips":{}}`, `{"ips":[null]}`, `{"ips":[{}]}`,
		`{"ips":[{"address":"10.0.0.1"}]}`, `{"ips":[{"address":"10.0.0.1/x"}]}`, `{"ips":[{"address":1}]}`,
		`{"ips":[{"address":"10.0.0.1/8","interface":"0"}]}`, `{"interfaces":[null]}`, `{"interfaces":[{}]}`, `{"interfaces":[{"name":"a","sandbox":1}]}`,
		`{"routes":[1]}`,
	} {
		if _, err := spec.ParseResult([]byte(bad), "1.1.0"); err == nil {
			t.Errorf("%s passes for a result", bad)
		}
	}
}
