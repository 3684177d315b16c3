package object

import (
	"context"
	"errors"
	"slices"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// answer is what the API server says to a write.
type answer struct{ error }

func (a answer) UpdateStatus(context.Context, *v2.Egress, metav1.UpdateOptions) (*v2.Egress, error) {
	return nil, a.error
}

func TestWriteStatus(t *testing.T) {
	e := &v2.Egress{ObjectMeta: metav1.ObjectMeta{Namespace: "internet", Name: "nat"}}
	for _, tt := range []struct {
		name  string
		err   error
		wrote bool
		says  string // "" is no error
	}{
		{"written", nil, true, ""},
		{"gone", apierrors.NewNotFound(v2.Resource("egresses"), "nat"), false, ""},
		{"refused", errors.New("no"), false, "write the status of Egress internet/nat: no"},
	} {
		wrote, err := WriteStatus(t.Context(), answer{tt.err}, e, metav1.UpdateOptions{})
		if wrote != tt.wrote || (err != nil) != (tt.says != "") || err != nil && err.Error() != tt.says {
			t.Errorf("%s: %v, error %v, want %v and %q", tt.name, wrote, err, tt.wrote, tt.says)
		}
	}
}

func TestBecameTrue(t *testing.T) {
	all := func(conditions ...string) (list []metav1.Condition) {
		for i := 0; i < len(conditions); i += 2 {
			list = append(list, metav1.Condition{Type: conditions[i], Status: metav1.ConditionStatus(conditions[i+1]), Reason: "Other", Message: conditions[i]})
		}
		return list
	}
	before := all("Was", "True", "Came", "False", "Left", "True", "Unknown", "False", "Unwatched", "False")
	after := all("Was", "True", "Came", "True", "Left", "False", "Unknown", "Unknown", "New", "True", "Unwatched", "True")
	var warnings []Warning
	for _, name := range []string{"New", "Was", "Came", "Left", "Unknown", "Absent"} {
		warnings = append(warnings, Warning{Condition: name, Reason: "Reason" + name})
	}
	var got []string
	for _, is := range BecameTrue(before, after, warnings...) {
		got = append(got, is.Reason+": "+is.Message)
	}
	if want := []string{"ReasonNew: New", "ReasonCame: Came"}; !slices.Equal(got, want) {
		t.Errorf("Events %q, want %q", got, want)
	}
	if r := after[1].Reason; r != "Other" {
		t.Errorf("the condition's own reason became %s", r)
	}
}
