package spec

import (
	"encoding/json"
	"errors"
	"fmt"
)

// object is a JSON object. Case matters in its names, unlike in the names of fields that
// encoding/json decodes.
type object map[string]json.RawMessage

// parseObject reads one object, or null, with nothing after it.
func parseObject(data []byte) (o object, err error) {
	err = json.Unmarshal(data, &o)
	if errors.As(err, new(*json.UnmarshalTypeError)) {
		err = errors.New("it is not an object")
	}
	return o, err
}

// get decodes a member into the variable that to points to. Without the member the variable stays as it is. A null
// makes a pointer, slice or map nil, and leaves other variables as they are.
func (o object) get(name string, to any) error {
	raw, ok := o[name]
	if ok && json.Unmarshal(raw, to) != nil {
		return fmt.Errorf("%s can't be %.100s", name, raw)
	}
	return nil
}

// encode returns the JSON of a value. The values of this package can always be encoded.
func encode(v any) []byte {
	b, _ := json.Marshal(v)
	return b
}
