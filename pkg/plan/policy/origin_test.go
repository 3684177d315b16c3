package policy

import (
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

func TestOrigin(t *testing.T) {
	p, err := Of(testPolicy(func(p *v2.EgressPolicy) {
		p.Spec.Destinations = []string{"203.0.113.0/24", "2001:db8::/32", "192.0.2.0/24", "203.0.113.0/24"}
	}))
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"namespace":"shop","name":"p","created":"1970-01-01T00:16:40Z","destinations":["192.0.2.0/24","203.0.113.0/24","2001:db8::/32"]}`
	if got := OriginOf(p).String(); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	for _, o := range []Origin{
		OriginOf(p),
		{Name: "c", Created: time.Unix(2, 0).UTC()},
		{Namespace: "n", Name: "all", Created: time.Unix(3, 0).UTC(), Destinations: []netip.Prefix{netip.MustParsePrefix("::/0")}},
	} {
		if got, err := ParseOrigin(o.String()); err != nil || !reflect.DeepEqual(got, o) || got.Policy().Name != o.Name {
			t.Errorf("%+v, error %v, want %+v", got, err, o)
		}
	}
}

func TestOriginsThatAreRefused(t *testing.T) {
	const created = `"created":"1970-01-01T00:16:40Z"`
	for name, text := range map[string]string{
		"nothing":             ``,
		"no object":           `[]`,
		"no name":             `{"name":"",` + created + `}`,
		"too long a name":     `{"name":"` + strings.Repeat("n", 254) + `",` + created + `}`,
		"too long":            `{"name":"n",` + created + strings.Repeat(" ", maxOrigin) + `}`,
		"no time":             `{"name":"n","created":"yesterday"}`,
		"another zone":        `{"name":"n","created":"1970-01-01T00:16:40+01:00"}`,
		"parts of a second":   `{"name":"n","created":"1970-01-01T00:16:40.5Z"}`,
		"a field more":        `{"name":"n",` + created + `,"address":"192.0.2.1"}`,
		"a field twice":       `{"name":"n","name":"n",` + created + `}`,
		"spaces":              `{"name":"n", ` + created + `}`,
		"more after the end":  `{"name":"n",` + created + `}{}`,
		"no subnet":           `{"name":"n",` + created + `,"destinations":["192.0.2.1"]}`,
		"host bits":           `{"name":"n",` + created + `,"destinations":["192.0.2.1/24"]}`,
		"an empty subnet":     `{"name":"n",` + created + `,"destinations":[""]}`,
		"too many":            `{"name":"n",` + created + `,"destinations":["::/0"` + strings.Repeat(`,"::/0"`, maxDestinations) + `]}`,
		"an empty list":       `{"name":"n",` + created + `,"destinations":[]}`,
		"an empty namespace":  `{"namespace":"","name":"n",` + created + `}`,
		"too long, namespace": `{"namespace":"` + strings.Repeat("n", 64) + `","name":"n",` + created + `}`,
	} {
		if o, err := ParseOrigin(text); err == nil {
			t.Errorf("%s: accepted as %+v", name, o)
		}
	}
}

// The longest Origin that a policy can have is one that can be read.
func TestLongestOrigin(t *testing.T) {
	p := Policy{Created: time.Unix(1000, 0)}
	p.Name.Namespace, p.Name.Name = strings.Repeat("n", maxNamespace), strings.Repeat("p", maxName)
	addr := netip.MustParseAddr("2001:db8:1234:5678:9abc:def0:1234:5600").As16()
	for i := range maxDestinations {
		addr[15] = byte(i)
		p.Destinations = append(p.Destinations, netip.PrefixFrom(netip.AddrFrom16(addr), 128))
	}
	text := OriginOf(p).String()
	if o, err := ParseOrigin(text); err != nil || len(o.Destinations) != maxDestinations {
		t.Errorf("%d bytes, %d destinations, error %v", len(text), len(o.Destinations), err)
	}
}

// What is accepted is what is written.
func FuzzParseOrigin(f *testing.F) {
	f.Add(Origin{Name: "c", Created: time.Unix(2, 0)}.String())
	f.Add(Origin{Namespace: "n", Name: "p", Created: time.Unix(2, 0), Destinations: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}}.String())
	f.Add(`{"name":"\u0000","created":"9999-12-31T23:59:59Z","destinations":["::ffff:1.2.3.4/128"]}`)
	f.Add(`{"Name":"n","CREATED":"0000-01-01T00:00:00Z"}`)
	f.Fuzz(func(t *testing.T, text string) {
		o, err := ParseOrigin(text)
		if err != nil {
			return
		}
		if got := o.String(); got != text || len(text) > maxOrigin || o.Name == "" || len(o.Destinations) > maxDestinations {
			t.Errorf("%q is accepted, and written as %q", text, got)
		}
	})
}
