package program

import (
	"github.com/spf13/pflag"
	"k8s.io/klog/v2"
)

// legacyFlags are the flags of Coil 2.x that manifests out there still pass, and
// whether they may stand without a value. They have no meaning any more: there
// is one dataplane, no webhook and no certificate, and logging is klog's.
var legacyFlags = map[string]bool{
	"backend":                        false,
	"register-from-main":             true,
	"addressblock-gc-interval":       false,
	"clear-routes-on-shutdown":       true,
	"webhook-addr":                   false,
	"cert-dir":                       false,
	"enable-cert-rotation":           true,
	"enable-restart-on-cert-refresh": true,
	"zap-devel":                      true,
	"zap-encoder":                    false,
	"zap-log-level":                  false,
	"zap-stacktrace-level":           false,
	"zap-time-encoding":              false,
}

// addLegacyFlags adds the legacy flags that the program doesn't define itself. No other flag is hidden.
func addLegacyFlags(fs *pflag.FlagSet) {
	for name, boolean := range legacyFlags {
		if fs.Lookup(name) != nil {
			continue
		}
		fs.String(name, "", "ignored, for manifests of Coil 2.x")
		f := fs.Lookup(name)
		f.Hidden = true
		if boolean {
			f.NoOptDefVal = "true"
		}
	}
}

// logLegacyFlags says once which legacy flags were given in vain.
func logLegacyFlags(logger klog.Logger, fs *pflag.FlagSet) {
	var names []string
	fs.Visit(func(f *pflag.Flag) {
		if f.Hidden {
			names = append(names, "--"+f.Name)
		}
	})
	if len(names) > 0 {
		logger.Info("Flags of Coil 2.x have no effect, remove them", "flags", names)
	}
}
