package convert

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

// Input is what was read. The zero Input is of the namespace "default".
type Input struct {
	// Namespace is that of objects that are of a namespace and have none.
	Namespace string

	gateways   []source[egressGateway]
	policies   []source[gatewayPolicy]
	infos      []source[clusterInfo]
	statics    []source[staticEgressIP]
	namespaces []source[typed]

	notes []Note
	order map[Origin]int
	seen  map[string]Origin
	other map[string]int
}

// source is an object of the input.
type source[T any] struct {
	object T
	origin Origin
}

// Known is how many objects of the two systems there are that can be converted.
func (in *Input) Known() int {
	return len(in.gateways) + len(in.policies) + len(in.infos) + len(in.statics)
}

// Ignored are the kinds that aren't converted, with how many there are of each.
func (in *Input) Ignored() (all []string) {
	for kind, n := range in.other {
		all = append(all, fmt.Sprintf("%d of %s", n, oneLine(kind)))
	}
	slices.SortFunc(all, func(a, b string) int { return strings.Compare(a[strings.Index(a, " "):], b[strings.Index(b, " "):]) })
	return all
}

// Read adds the objects of a text with documents of YAML or JSON, Lists among them. The error says in which document, and in which line that begins.
func (in *Input) Read(file string, text []byte) error {
	for i, d := range split(text) {
		objects, err := d.objects()
		if err != nil {
			return fmt.Errorf("%s: document %d, line %d: %w", file, i+1, d.line, err)
		}
		for _, raw := range objects {
			if err := in.object(Origin{File: file, Line: d.line}, raw); err != nil {
				return fmt.Errorf("%s: document %d, line %d: %w", file, i+1, d.line, err)
			}
		}
	}
	return nil
}

// document is one of a text.
type document struct {
	text []byte
	line int // of its first line, from 1
}

// split takes the documents of a text apart, without those that have nothing but comments.
func split(text []byte) (all []document) {
	d, line := document{line: 1}, 0
	end := func(next int) {
		if !empty(d.text) {
			all = append(all, d)
		}
		d = document{line: next}
	}
	for l := range bytes.Lines(text) {
		line++
		if t := bytes.TrimRight(l, " \t\r\n"); bytes.HasPrefix(l, []byte("---")) && (len(t) == 3 || l[3] == ' ' || l[3] == '\t') {
			end(line + 1)
			if l = bytes.TrimLeft(l[3:], " \t"); len(t) > 3 {
				d.line = line
			} else {
				continue
			}
		} else if bytes.Equal(t, []byte("...")) {
			end(line + 1)
			continue
		}
		if empty(d.text) { // it begins where its first word is
			d.text, d.line = nil, line
		}
		d.text = append(d.text, l...)
	}
	end(line)
	return all
}

// empty says whether a document has nothing but comments.
func empty(text []byte) bool {
	for l := range bytes.Lines(text) {
		if l = bytes.TrimSpace(l); len(l) > 0 && l[0] != '#' {
			return false
		}
	}
	return true
}

// objects returns the JSON of a document's objects: one, or several that follow each other if it is JSON.
func (d document) objects() ([][]byte, error) {
	if bytes.HasPrefix(bytes.TrimSpace(d.text), []byte("{")) {
		var all [][]byte
		for dec := json.NewDecoder(bytes.NewReader(d.text)); ; {
			var raw json.RawMessage
			err := dec.Decode(&raw)
			if errors.Is(err, io.EOF) {
				return all, nil
			}
			if err != nil {
				break // YAML may begin so, too
			}
			all = append(all, raw)
		}
	}
	raw, err := yaml.YAMLToJSONStrict(d.text)
	if err != nil { // it names lines: those of the whole text are wanted
		if _, inText := yaml.YAMLToJSONStrict(slices.Concat(bytes.Repeat([]byte("\n"), d.line-1), d.text)); inText != nil {
			err = inText
		}
		return nil, err
	}
	return [][]byte{raw}, nil
}

// object adds an object, or those of a List.
func (in *Input) object(o Origin, raw []byte) error {
	var head typed
	if err := decode(raw, &head); err != nil {
		return err
	}
	if head.Kind == "" || head.APIVersion == "" {
		return errors.New("the object has no apiVersion or no kind")
	}
	gv, err := schema.ParseGroupVersion(head.APIVersion)
	if err != nil {
		return err
	}
	core := gv.Group == ""
	if kind, ok := strings.CutSuffix(head.Kind, "List"); ok && (core && kind == "" || gv.Group == gatewayGroup || gv.Group == staticGroup) {
		return in.list(o, raw, metav1.TypeMeta{APIVersion: head.APIVersion, Kind: kind})
	}
	o.Kind, o.Namespace, o.Name = head.Kind, head.Metadata.Namespace, head.Metadata.Name
	switch {
	case gv.Group == gatewayGroup && gv.Version != gatewayVersion:
		return fmt.Errorf("%s has version %s, and only %s is known", head.Kind, oneLine(gv.Version), gatewayVersion)
	case gv.Group == staticGroup && gv.Version != staticVersion:
		return fmt.Errorf("%s has version %s, and only %s is known", head.Kind, oneLine(gv.Version), staticVersion)
	}
	switch (schema.GroupKind{Group: gv.Group, Kind: head.Kind}) {
	case schema.GroupKind{Group: gatewayGroup, Kind: "EgressGateway"}:
		return read(in, o, raw, &in.gateways, "")
	case schema.GroupKind{Group: gatewayGroup, Kind: "EgressClusterPolicy"}:
		return read(in, o, raw, &in.policies, "")
	case schema.GroupKind{Group: gatewayGroup, Kind: "EgressPolicy"}:
		return read(in, o, raw, &in.policies, in.namespace())
	case schema.GroupKind{Group: gatewayGroup, Kind: "EgressClusterInfo"}:
		return read(in, o, raw, &in.infos, "")
	case schema.GroupKind{Group: staticGroup, Kind: "StaticEgressIP"}:
		return read(in, o, raw, &in.statics, in.namespace())
	}
	if core && head.Kind == "Namespace" && head.Metadata.Labels[labelDefault] != "" {
		in.ordered(o)
		in.namespaces = append(in.namespaces, source[typed]{head, o})
		return nil
	}
	if in.other == nil {
		in.other = map[string]int{}
	}
	in.other[head.Kind+" ("+head.APIVersion+")"]++
	return nil
}

func (in *Input) namespace() string {
	if in.Namespace == "" {
		return metav1.NamespaceDefault
	}
	return in.Namespace
}

// list adds the objects of a List. Those of a list of one kind may have neither kind nor apiVersion.
func (in *Input) list(o Origin, raw []byte, of metav1.TypeMeta) error {
	var list struct {
		Items []json.RawMessage `json:"items"`
	}
	if err := decode(raw, &list); err != nil {
		return err
	}
	for i, item := range list.Items {
		o.Item = i + 1
		fields := map[string]json.RawMessage{}
		err := decode(item, &fields)
		if err == nil && of.Kind != "" && fields["kind"] == nil && fields["apiVersion"] == nil {
			fields["kind"], _ = json.Marshal(of.Kind)
			fields["apiVersion"], _ = json.Marshal(of.APIVersion)
			item, err = json.Marshal(fields)
		}
		if err == nil {
			err = in.object(o, item)
		}
		if err != nil {
			return fmt.Errorf("item %d: %w", i+1, err)
		}
	}
	return nil
}

// decode reads JSON, and refuses a field that is there twice.
func decode(raw []byte, into any) error {
	twice, err := kjson.UnmarshalStrict(raw, into, kjson.DisallowDuplicateFields)
	return errors.Join(append(twice, err)...)
}

// read adds an object of a known kind. Fields that the kind doesn't have are noted.
func read[T any](in *Input, o Origin, raw []byte, into *[]source[T], namespace string) error {
	if o.Namespace == "" {
		o.Namespace = namespace
	}
	if bad := validation.IsDNS1123Subdomain(o.Name); len(bad) > 0 {
		return fmt.Errorf("metadata.name of the %s can't be %.100q: %s", o.Kind, o.Name, strings.Join(bad, ", "))
	}
	if namespace == "" && o.Namespace != "" {
		return fmt.Errorf("%s is of no namespace, but has metadata.namespace", o.Object())
	}
	if bad := validation.IsDNS1123Label(o.Namespace); namespace != "" && len(bad) > 0 {
		return fmt.Errorf("metadata.namespace of the %s can't be %.100q: %s", o.Kind, o.Namespace, strings.Join(bad, ", "))
	}
	if first, ok := in.seen[o.Object()]; ok {
		return fmt.Errorf("%s is there twice: first at %s", o.Object(), first.Place())
	}
	if in.seen == nil {
		in.seen = map[string]Origin{}
	}
	in.seen[o.Object()] = o
	in.ordered(o)
	var object T
	if err := decode(raw, &object); err != nil {
		return fmt.Errorf("%s: %w", o.Object(), err)
	}
	unknown, err := kjson.UnmarshalStrict(raw, new(T), kjson.DisallowUnknownFields)
	if err != nil {
		return fmt.Errorf("%s: %w", o.Object(), err)
	}
	for _, u := range unknown {
		field := u.Error()
		if f, ok := u.(kjson.FieldError); ok {
			field = f.FieldPath()
		}
		in.notes = append(in.notes, Note{
			Origin: o, Field: oneLine(field), Lost: !strings.HasPrefix(field, "status."), Why: "this field isn't one of the " + o.Kind + "'s", Instead: "see whether it is misspelt, or take it out",
		})
	}
	*into = append(*into, source[T]{object, o})
	return nil
}

// ordered remembers the place of an object in the input.
func (in *Input) ordered(o Origin) {
	if in.order == nil {
		in.order = map[Origin]int{}
	}
	in.order[o] = len(in.order)
}
