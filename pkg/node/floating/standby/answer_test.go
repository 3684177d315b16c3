package standby

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/coil-net/coil/pkg/node/floating/frames"
	"github.com/coil-net/coil/pkg/testkit"
)

// An answer is one frame, however many addresses are refused, and says that of each, or that there are others.
func TestAnswerIsOneFrame(t *testing.T) {
	for name, c := range map[string]struct {
		block  string
		blocks int
		others bool
	}{
		"some":          {"p-%d", 10, false},
		"many":          {"p-%d", 800, false},
		"of long names": {strings.Repeat("p", 240) + "-%d", 500, true},
	} {
		t.Run(name, func(t *testing.T) {
			var a, got answer
			why := strings.Repeat("\x00", 1000)
			for i := range c.blocks {
				a.refuse(fmt.Sprintf(c.block, i), why)
			}
			var wire bytes.Buffer
			testkit.Check(t, frames.Write(&wire, frames.Ready, testkit.Must(json.Marshal(a))(t)))
			var buffer []byte
			_, payload, err := frames.Read(&wire, &buffer)
			if err != nil {
				t.Fatal(err)
			}
			testkit.Check(t, json.Unmarshal(payload, &got))
			if got.Others != c.others || !c.others && len(got.Refused) != c.blocks || len(got.Refused) == 0 {
				t.Errorf("%d of %d are said, others: %t", len(got.Refused), c.blocks, got.Others)
			}
			if got.Refused[fmt.Sprintf(c.block, 0)] == "" {
				t.Error("there is no reason at all")
			}
		})
	}
}
