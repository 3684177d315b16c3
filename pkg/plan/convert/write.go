package convert

import (
	"encoding/json"
	"fmt"
	"strings"

	"sigs.k8s.io/yaml"
)

// AnnotationFrom, in JSON, is what an object was made of. YAML has a comment.
const AnnotationFrom = "coil.cybozu.com/converted-from"

// from says what an object was made of, in few words if that is much.
func (o Object) from() string {
	const most = 5
	var all []string
	for _, f := range o.From[:min(len(o.From), most)] {
		all = append(all, f.String())
	}
	if more := len(o.From) - most; more > 0 {
		all = append(all, fmt.Sprintf("%d more", more))
	}
	return strings.Join(all, ", ")
}

// YAML are the objects as documents, each with a comment that says what it was made of.
func (r Result) YAML() ([]byte, error) {
	var b strings.Builder
	for i, o := range r.Objects {
		text, err := yaml.Marshal(o.Object)
		if err != nil {
			return nil, err
		}
		if i > 0 {
			b.WriteString("---\n")
		}
		b.WriteString("# from " + o.from() + "\n")
		b.Write(text)
	}
	return []byte(b.String()), nil
}

// JSON are the objects as a List, each with an annotation that says what it was made of.
func (r Result) JSON() ([]byte, error) {
	list := struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
		Items      []any  `json:"items"`
	}{"v1", "List", []any{}}
	for _, o := range r.Objects {
		annotations := map[string]string{AnnotationFrom: o.from()}
		for k, v := range o.GetAnnotations() {
			annotations[k] = v
		}
		o.SetAnnotations(annotations)
		list.Items = append(list.Items, o.Object)
	}
	text, err := json.MarshalIndent(list, "", "  ")
	if err != nil {
		return nil, err
	}
	return append(text, '\n'), nil
}

// Text are the notes, below each object of the input.
func (r Result) Text() string {
	var b strings.Builder
	var last Origin
	for _, n := range r.Notes {
		if n.Origin != last {
			fmt.Fprintf(&b, "%s\n", n.Origin)
		}
		last = n.Origin
		what := "look at it"
		if n.Lost {
			what = "no counterpart"
		}
		fmt.Fprintf(&b, "  %s: %s: %s\n", n.Field, what, n.Why)
		if n.Instead != "" {
			fmt.Fprintf(&b, "    to do: %s\n", n.Instead)
		}
	}
	return b.String()
}
