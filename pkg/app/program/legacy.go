package program

import (
	"github.com/spf13/pflag"
	"k8s.io/klog/v2"
)

// legacyFlags are the flags of Coil 2.x that manifests out there still pass.
// They have no meaning any more: there is one dataplane, no webhook and no
// certificate, and logging is klog's.
var legacyFlags = []string{
	"backend", "register-from-main", "addressblock-gc-interval", "clear-routes-on-shutdown",
	"webhook-addr", "cert-dir", "enable-cert-rotation", "enable-restart-on-cert-refresh",
	"zap-devel", "zap-encoder", "zap-log-level", "zap-stacktrace-level", "zap-time-encoding",
}

// ignored is the set of legacy flags, and which of them were given.
type ignored struct{ fs *pflag.FlagSet }

// addLegacyFlags adds the legacy flags that the program doesn't define itself.
func addLegacyFlags(fs *pflag.FlagSet) ignored {
	for _, name := range legacyFlags {
		if fs.Lookup(name) != nil {
			continue
		}
		fs.String(name, "", "ignored, for manifests of Coil 2.x")
		f := fs.Lookup(name)
		f.NoOptDefVal = "true"
		f.Hidden = true
	}
	return ignored{fs}
}

// log says once which flags were given in vain.
func (i ignored) log(logger klog.Logger) {
	var names []string
	for _, name := range legacyFlags {
		if f := i.fs.Lookup(name); f != nil && f.Hidden && f.Changed {
			names = append(names, "--"+name)
		}
	}
	if len(names) > 0 {
		logger.Info("Flags of Coil 2.x have no effect, remove them", "flags", names)
	}
}
