package keys

import (
	"bytes"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

func key(b byte) []byte { return bytes.Repeat([]byte{b}, Size) }

// secret has keys that were made a while ago.
func secret(ago time.Duration, data map[string][]byte) *corev1.Secret {
	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: Namespace, Name: Name, Annotations: map[string]string{v2.AnnotationRotated: now.Add(-ago).Format(time.RFC3339)}},
		Type:       corev1.SecretTypeOpaque, Data: data,
	}
}

var now = time.Unix(1e9, 0).UTC()

func TestRotate(t *testing.T) {
	whole := map[string][]byte{"current": key('c'), "next": key('n'), "previous": key('p')}
	later := map[string][]byte{"previous": key('c'), "current": key('n'), "next": key('1')}
	noTime := secret(0, whole)
	noTime.Annotations = nil
	empty := secret(0, nil)
	empty.Annotations = nil
	for name, tt := range map[string]struct{ have, want *corev1.Secret }{
		"as it is installed": {empty, secret(0, map[string][]byte{"current": key('1'), "next": key('2')})},
		"young":              {secret(Period-time.Second, whole), nil},
		"first day":          {secret(time.Hour, map[string][]byte{"current": key('c'), "next": key('n')}), nil},
		"old":                {secret(Period, whole), secret(0, later)},
		"the clock was set":  {secret(-Period, whole), secret(0, later)},
		"a bit in advance":   {secret(-time.Minute, whole), nil},
		"without a time":     {noTime, secret(0, later)},
		"without a next one": {secret(0, map[string][]byte{"current": key('c')}), secret(0, map[string][]byte{"current": key('c'), "next": key('2')})},
		"without a current":  {secret(0, map[string][]byte{"next": key('n')}), secret(0, map[string][]byte{"current": key('1'), "next": key('n')})},
		"short":              {secret(0, map[string][]byte{"current": []byte("short"), "next": nil}), secret(0, map[string][]byte{"current": key('1'), "next": key('2')})},
	} {
		drawn := byte('0')
		random := func() []byte { drawn++; return key(drawn) }
		if diff := cmp.Diff(tt.want, Rotate(tt.have, now, random)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// Whatever key a node seals with, it can be opened by nodes that have seen one change less, or one more.
func TestNeighboursUnderstandEachOther(t *testing.T) {
	drawn := byte(0)
	random := func() []byte { drawn++; return key(drawn) }
	before := Rotate(secret(0, nil), now, random)
	for i := range 5 {
		after := Rotate(before, now.Add(time.Duration(i+1)*Period), random)
		for _, tt := range []struct{ sealer, opener *corev1.Secret }{{before, after}, {after, before}} {
			understood := false
			for _, k := range Of(tt.opener) {
				understood = understood || bytes.Equal(k, Of(tt.sealer)[0])
			}
			if !understood {
				t.Errorf("change %d: %v isn't among %v", i, Of(tt.sealer)[0][:1], Of(tt.opener))
			}
		}
		before = after
	}
}

func TestOf(t *testing.T) {
	for name, tt := range map[string]struct {
		have *corev1.Secret
		want [][]byte
	}{
		"none":               {nil, nil},
		"all":                {secret(0, map[string][]byte{"current": key('c'), "next": key('n'), "previous": key('p')}), [][]byte{key('c'), key('n'), key('p')}},
		"two":                {secret(0, map[string][]byte{"current": key('c'), "previous": key('p')}), [][]byte{key('c'), key('p')}},
		"no current one":     {secret(0, map[string][]byte{"next": key('n')}), nil},
		"a short one":        {secret(0, map[string][]byte{"current": key('c'), "next": []byte("n")}), [][]byte{key('c')}},
		"a short current":    {secret(0, map[string][]byte{"current": {}, "next": key('n')}), nil},
		"others are ignored": {secret(0, map[string][]byte{"current": key('c'), "x": key('x')}), [][]byte{key('c')}},
	} {
		if diff := cmp.Diff(tt.want, Of(tt.have)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
