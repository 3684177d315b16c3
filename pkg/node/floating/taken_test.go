package floating

import (
	"fmt"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/holding"
)

// A node counts what it gets, and why, and nothing that it had when it began.
func TestTaken(t *testing.T) {
	record := func(holder string, epoch int64, given bool) known {
		b := &v2.AddressBlock{}
		b.Name = "p-0"
		return known{block: b, record: holding.Record{Holder: holder, Epoch: epoch, HandedOver: given}}
	}
	for name, c := range map[string]struct {
		before, after known
		want          string
	}{
		"the first":               {record("", 0, false), record("a", 1, true), "first"},
		"given":                   {record("b", 1, false), record("a", 2, true), "given"},
		"given to nobody":         {record("", 2, true), record("a", 3, true), "given"},
		"failed":                  {record("b", 1, true), record("a", 2, false), "failed"},
		"back, with a gap":        {record("a", 3, true), record("a", 5, false), "failed"},
		"had when it began":       {known{}, record("a", 3, true), ""},
		"nothing else":            {record("a", 3, true), record("a", 3, true), ""},
		"another node's":          {record("a", 3, true), record("b", 4, true), ""},
		"nobody's":                {record("a", 3, true), record("", 4, true), ""},
		"another's, with a claim": {record("b", 3, true), record("b", 3, true), ""},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMetrics(prometheus.NewRegistry())
			m.changed("a", c.before, c.after)
			want := ""
			if c.want != "" {
				want = fmt.Sprintf("# TYPE coil_floating_taken_total counter\ncoil_floating_taken_total{block=%q,reason=%q} 1\n", "p-0", c.want)
				want = "# HELP coil_floating_taken_total Times that this node has got a floating address, by the AddressBlock and why: the first one to have it, given by the holder of before, or taken since that one had failed.\n" + want
			}
			if err := testutil.CollectAndCompare(m.taken, strings.NewReader(want)); err != nil {
				t.Error(err)
			}
			if m.gone(c.after); testutil.CollectAndCount(m.taken) > 0 {
				t.Error("an address that is gone is counted")
			}
		})
	}
}
