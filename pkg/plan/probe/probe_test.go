package probe

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/testkit"
)

func TestParse(t *testing.T) {
	full := Result{
		Kernel: "6.1.0", ModulesUnlisted: true, MissingModules: []string{"nf_tables"}, MissingEgressModules: []string{"fou"},
		CNI:    []CNIFile{{Name: "10-coil.conflist", Plugins: []string{"coil"}}, {Name: "x.conf"}},
		Record: &Record{Version: 1, Known: 2, Damaged: true}, Problems: []string{"a\nb"},
	}
	line := string(testkit.Must(json.Marshal(full))(t))
	for _, tt := range []struct {
		name, log string
		want      *Result
		err       string
	}{
		{"between lines of klog", "I1126 22:00:00 Starting\n" + line + "\nI1126 22:00:00 Ended\n", &full, ""},
		{"the last one", "{\n" + `{"kernel":"5.10"}`, &Result{Kernel: "5.10"}, ""},
		{"nothing", "E1126 22:00:00 \"Ended\" err=\"uname\"\n", nil, "no result"},
		{"cut off", line[:40], nil, "--image"},
		{"of another version", `{"kernel":"5.10","new":true}`, nil, "--image"},
		{"of another program", `{}`, nil, "--image"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := Parse([]byte(tt.log))
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("result (-want +got):\n%s", diff)
			}
			if tt.err == "" && err != nil || tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)) {
				t.Errorf("error %v, want %q", err, tt.err)
			}
		})
	}
}
