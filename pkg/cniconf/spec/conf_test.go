package spec_test

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/cniconf/spec"
)

// code returns the CNI code of err; it fails the test if err is no CNI error.
func code(t *testing.T, err error) uint {
	t.Helper()
	var e *spec.Error
	if !errors.As(err, &e) {
		t.Fatalf("error %v (%T) is not a CNI error", err, err)
	}
	return e.Code
}

func TestParseConf(t *testing.T) {
	tests := []struct {
		name, in string
		want     spec.Conf
		code     uint
	}{
		{
			name: "defaults", in: `{"cniVersion":"1.1.0","name":"n","type":"coil","unknown":[1]}`,
			want: spec.Conf{CNIVersion: "1.1.0", Name: "n", Type: "coil", Socket: "/run/coild.sock", DelQueueDir: spec.DefaultDelQueueDir},
		},
		{
			name: "all keys", in: `{"cniVersion":"0.4.0","name":"n","type":"coil","socket":"/s","delQueueDir":"/q","prevResult":{"a":1}}`,
			want: spec.Conf{CNIVersion: "0.4.0", Name: "n", Type: "coil", Socket: "/s", DelQueueDir: "/q", PrevResult: json.RawMessage(`{"a":1}`)},
		},
		{
			name: "null is no prevResult", in: `{"prevResult":null}`,
			want: spec.Conf{Socket: "/run/coild.sock", DelQueueDir: spec.DefaultDelQueueDir},
		},
		{name: "no JSON", in: `{"socket"`, code: 6},
		{name: "socket is no string", in: `{"socket":1}`, code: 6},
		{name: "relative socket", in: `{"socket":"run/coild.sock"}`, code: 7},
		{name: "socket as URL", in: `{"socket":"unix:///run/coild.sock"}`, code: 7},
		{name: "long socket", in: `{"socket":"/` + strings.Repeat("x", 107) + `"}`, code: 7},
		{name: "relative queue", in: `{"delQueueDir":"q"}`, code: 7},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) { mustParse(t, spec.ParseConf, tt.in, tt.want, tt.code) })
	}
}

const result2 = `{"cniVersion":"1.1.0","interfaces":[{"name":"veth1"},{"name":"eth0","sandbox":"/ns"}],` +
	`"ips":[{"interface":1,"address":"10.1.0.1/32"},{"interface":1,"address":"fd01::1/128"}]}`

func TestPrevious(t *testing.T) {
	result040 := strings.NewReplacer(`"cniVersion":"1.1.0",`, ``, `{"interface":1,"address":"10`, `{"version":"4","interface":1,"address":"10`,
		`{"interface":1,"address":"fd`, `{"version":"6","interface":1,"address":"fd`).Replace(result2)
	tests := []struct {
		name, version, prev string
		none, bad           bool
	}{
		{name: "none", version: "1.1.0", prev: `null`, none: true},
		{name: "newest", version: "1.1.0", prev: result2},
		{name: "newest without a version", version: "1.1.0", prev: strings.Replace(result2, `"cniVersion":"1.1.0",`, ``, 1)},
		{name: "0.3.1 without a version", version: "0.3.1", prev: result040},
		{name: "0.4.0 with an empty version", version: "0.4.0", prev: strings.Replace(result040, `{`, `{"cniVersion":"",`, 1)},
		{name: "0.4.0", version: "0.4.0", prev: strings.Replace(result040, `{`, `{"cniVersion":"0.4.0",`, 1)},
		{name: "unknown version", version: "1.1.0", prev: `{"cniVersion":"9.0.0"}`, bad: true},
		{name: "not an object", version: "1.1.0", prev: `[1]`, bad: true},
		{name: "bad address", version: "1.1.0", prev: `{"cniVersion":"1.1.0","ips":[{"address":"10.1.0.1"}]}`, bad: true},
		{name: "null address", version: "1.1.0", prev: `{"cniVersion":"1.1.0","ips":[null]}`, bad: true},
		{name: "null interface to convert", version: "0.4.0", prev: `{"cniVersion":"0.4.0","interfaces":[null]}`, bad: true},
		{name: "null address to convert", version: "0.3.1", prev: `{"ips":[null]}`, bad: true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, err := spec.ParseConf([]byte(`{"cniVersion":"` + tt.version + `","prevResult":` + tt.prev + `}`))
			if err != nil {
				t.Fatal(err)
			}
			got, err := c.Previous()
			switch {
			case tt.bad:
				if c := code(t, err); c != 6 {
					t.Errorf("code is %d (%v), want 6", c, err)
				}
			case err != nil:
				t.Fatal(err)
			case tt.none:
				if got != nil {
					t.Errorf("result is %v, want nil", got)
				}
			default:
				if len(got.Interfaces) != 2 || got.Interfaces[1] != (spec.Interface{Name: "eth0", Sandbox: "/ns"}) ||
					len(got.Addresses) != 2 || got.Addresses[1] != (spec.Address{IP: "fd01::1", Interface: 1}) {
					t.Errorf("result is %+v", got)
				}
				if r, err := library(t, string(got.As(spec.Newest)), spec.Newest, spec.Newest); err != nil {
					t.Errorf("the library reads %v, %v", r, err)
				}
			}
		})
	}
}

func TestValidAttachments(t *testing.T) {
	a, b := attachment.ID{ContainerID: "a", IfName: "eth0"}, attachment.ID{ContainerID: "b", IfName: "eth0"}
	const one, two = `[{"containerID":"a","ifname":"eth0"}]`, `[{"containerID":"b","ifname":"eth0"},{"containerID":"a","ifname":"eth0"}]`
	tests := []struct {
		name, in string
		want     []attachment.ID
		code     uint
	}{
		{name: "the specified key", in: `{"cni.dev/valid-attachments":` + one + `}`, want: []attachment.ID{a}},
		{name: "the misspelt key", in: `{"cni.dev/attachments":` + one + `}`, want: []attachment.ID{a}},
		{name: "the same under both", in: `{"cni.dev/valid-attachments":` + one + `,"cni.dev/attachments":` + one + `}`, want: []attachment.ID{a}},
		{name: "both differ", in: `{"cni.dev/valid-attachments":` + one + `,"cni.dev/attachments":` + two + `}`, want: []attachment.ID{a, b}},
		{name: "empty", in: `{"cni.dev/valid-attachments":[]}`, want: []attachment.ID{}},
		{name: "null", in: `{"cni.dev/valid-attachments":null}`, want: []attachment.ID{}},
		{name: "none", in: `{}`, code: 7},
		{name: "without an interface", in: `{"cni.dev/valid-attachments":[{"containerID":"a"}]}`, code: 7},
		{name: "without a container", in: `{"cni.dev/attachments":[{"ifname":"a"}]}`, code: 7},
		{name: "no list", in: `{"cni.dev/valid-attachments":{}}`, code: 6},
		{name: "no JSON", in: `[`, code: 6},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) { mustParse(t, spec.ValidAttachments, tt.in, tt.want, tt.code) })
	}
}

func TestCheckVersion(t *testing.T) {
	for version, good := range map[string]bool{"1.1.0": true, "0.4.0": true, "0.3.1": true, "0.3.0": false, "2.0.0": false, "": false} {
		if err := spec.CheckVersion(version); (err == nil) != good || err != nil && code(t, err) != 1 {
			t.Errorf("version %q: %v", version, err)
		}
	}
}

func FuzzConf(f *testing.F) {
	f.Add([]byte(`{"cniVersion":"1.1.0","prevResult":` + result2 + `}`))
	f.Add([]byte(`{"cniVersion":"0.3.1","prevResult":{"ips":[null],"routes":[null],"interfaces":[null],"dns":null}}`))
	f.Add([]byte(`{"cni.dev/valid-attachments":[null]}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		if _, err := spec.ValidAttachments(in); err != nil {
			code(t, err)
		}
		c, err := spec.ParseConf(in)
		if err != nil {
			code(t, err)
			return
		}
		if r, err := c.Previous(); err != nil {
			code(t, err)
		} else if r != nil {
			for _, v := range spec.Versions() {
				if again, err := spec.ParseResult(r.As(v), ""); err != nil || again.Version != v {
					t.Errorf("as %s: %+v, %v", v, again, err)
				}
			}
		}
	})
}

// mustParse fails the test unless a text has the wanted value, or the wanted code of an error if that isn't 0.
func mustParse[T any](t *testing.T, parse func([]byte) (T, error), in string, want T, wantCode uint) {
	t.Helper()
	got, err := parse([]byte(in))
	if wantCode != 0 {
		if c := code(t, err); c != wantCode {
			t.Fatalf("code is %d (%v), want %d", c, err, wantCode)
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
