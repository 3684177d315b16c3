package lbagent

import (
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// The defaults are valid on a machine that has a name; what is missing is named, all of it at once.
func TestScenario38Options(t *testing.T) {
	o := &Options{}
	fs := pflag.NewFlagSet("coil-lb-agent", pflag.ContinueOnError)
	o.AddFlags(fs)
	if err := fs.Parse([]string{"--name=gw1"}); err != nil {
		t.Fatal(err)
	}
	if err := o.Validate(); err != nil {
		t.Errorf("the defaults are refused: %v", err)
	}
	if !o.Forwarding || o.Keepalived.Main != "/etc/keepalived/keepalived.conf" || o.lastFile() != "/var/lib/coil-lb-agent/last.json" {
		t.Errorf("the defaults are %+v", o)
	}
	if err := fs.Parse([]string{"--name=", "--state-dir="}); err != nil {
		t.Fatal(err)
	}
	if err := o.Validate(); err == nil || !strings.Contains(err.Error(), "--name") || !strings.Contains(err.Error(), "--state-dir") {
		t.Errorf("without a name and a directory: %v", err)
	}
}
