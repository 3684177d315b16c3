// Package arch checks what the compiler can't: which package of this repository
// may import which, what a program may link, and what product code may call.
//
// It reads sources and the output of "go list". It must not know what the code
// does.
package arch

import (
	"fmt"
	"slices"
	"strings"
)

const module = "github.com/coil-net/coil/"

// layer is the place of a package. Imports go from higher layers to lower ones.
type layer int

const (
	// unplaced packages are below pkg/, but nobody has said where they belong.
	unplaced layer = iota
	// pure packages compute: no I/O, no kernel, no API calls.
	pure
	// adapter packages speak to one thing outside of the process.
	adapter
	// useCase packages do what a program is for.
	useCase
	// application packages compose a program.
	application
	// program packages are mains.
	program
	// support packages are for tests; products never import them.
	support
	// tool packages are for developers; products never import them.
	tool
)

func (l layer) String() string {
	return [...]string{"no layer", "pure", "adapter", "use-case", "app", "cmd", "test support", "tools"}[l]
}

// places says where the packages of the module are; the longest prefix counts,
// and a prefix without a slash at its end is one package without those below it.
var places = map[string]layer{
	"pkg/apis/":       pure,
	"pkg/attachment/": pure,
	"pkg/ipam/":       pure,
	"pkg/plan/":       pure,
	"pkg/dataplane/":  pure,
	"pkg/faultpoint/": pure,
	"pkg/holding/":    pure,
	"pkg/ledger/":     pure,
	"pkg/store":       pure,
	"pkg/syncmap/":    pure,

	"generated/":        adapter,
	"pkg/kernel/":       adapter,
	"pkg/store/sqlite/": adapter,
	"pkg/kube/":         adapter,
	"pkg/peers/":        adapter,
	"pkg/observe/":      adapter,
	"pkg/reconcile/":    adapter,
	"pkg/atomicfile/":   adapter,
	"pkg/delqueue/":     adapter,
	"pkg/cniconf/":      adapter,
	"pkg/etcd/":         adapter,
	"pkg/keepalived/":   adapter,
	"pkg/openstack/":    adapter,

	"pkg/controller/": useCase,
	"pkg/node/":       useCase,
	"pkg/podnet/":     useCase,
	"pkg/clientnet/":  useCase,
	"pkg/router/":     useCase,
	"pkg/natgateway/": useCase,
	"pkg/lbgateway/":  useCase,
	"pkg/cniplugin/":  useCase,
	"pkg/migrate/":    useCase,

	"pkg/app/": application,
	"cmd/":     program,

	"pkg/testkit/":                    support,
	"pkg/clientnet/clientnettest/":    support,
	"pkg/node/floating/floatingtest/": support,
	"pkg/plan/plantest/":              support,
	"pkg/store/storetest/":            support,

	"hack/":        tool,
	"integration/": tool,
}

// lower says which layers the packages of a layer may import.
var lower = map[layer][]layer{
	pure:        {pure},
	adapter:     {pure, adapter},
	useCase:     {pure, adapter, useCase},
	application: {pure, adapter, useCase, application},
	program:     {application},
	support:     {pure, adapter, useCase, support},
	tool:        {pure, adapter, useCase, application, support, tool},
}

// closed are folders whose packages import, of this module, nothing but pure
// packages, each other and pkg/atomicfile.
var closed = []string{"pkg/kernel/", "pkg/store/sqlite/", "pkg/keepalived/"}

// siblings are folders whose packages don't import each other. The package of
// the folder itself holds the words that they share.
var siblings = []string{"pkg/controller/", "pkg/node/"}

// apart are packages below the same folder that don't import each other, in either direction.
var apart = [][2]string{{"pkg/node/floating/handover", "pkg/node/floating/standby"}}

// useCases says which use-cases may import which others, apart from those below
// the same folder.
var useCases = map[string][]string{
	"pkg/node/":      {"pkg/podnet/", "pkg/clientnet/"},
	"pkg/clientnet/": {"pkg/podnet/"},
}

// gates are the only packages that import a library.
var gates = []struct{ library, only string }{
	{"github.com/vishvananda/netlink", "pkg/kernel/rtnl"},
	{"github.com/google/nftables", "pkg/kernel/nft"},
	{"modernc.org/sqlite", "pkg/store/sqlite"},
	{"go.etcd.io/etcd/client/v3", "pkg/etcd"},
	{"github.com/gophercloud/gophercloud/v2", "pkg/openstack"},
}

// ioLibraries are what pure packages must not import.
var ioLibraries = []string{
	"net", "net/http", "net/rpc", "os", "os/exec", "os/signal", "syscall", "database/sql",
	"golang.org/x/sys", "google.golang.org/grpc", "k8s.io/client-go", "github.com/prometheus",
}

var (
	clientGo = "k8s.io/client-go"
	sqlite   = "modernc.org/sqlite"
	nftables = "github.com/google/nftables"
	netlink  = "github.com/vishvananda/netlink"
)

// controlled are packages of API types that only the controllers need.
var controlled = []string{"k8s.io/api/networking", "k8s.io/api/policy", "k8s.io/api/rbac"}

// links says what must not be linked into what, at any depth.
var links = []struct {
	into string
	not  []string
}{
	// It is started for every ADD and DEL, so it has to start fast.
	{"cmd/coil", []string{clientGo, sqlite, nftables, netlink}},
	{"pkg/cniplugin/", []string{clientGo, sqlite, nftables, netlink}},
	// They run without rights on their node.
	{"cmd/coil-ipam-controller", []string{"pkg/kernel", netlink, nftables, sqlite, "pkg/store/sqlite"}},
	{"cmd/coil-migrator", []string{"pkg/kernel", netlink, nftables, sqlite, "pkg/store/sqlite"}},
	{"cmd/coilctl", []string{"pkg/kernel", netlink, nftables, sqlite, "pkg/store/sqlite"}},
	{"cmd/coil-egress-controller", []string{"pkg/kernel", netlink, nftables, sqlite, "pkg/store/sqlite"}},
	{"cmd/coil-lb-controller", []string{"pkg/kernel", netlink, nftables, sqlite, "pkg/store/sqlite"}},
	{"pkg/controller/", []string{"pkg/kernel", netlink, nftables, sqlite, "pkg/store/sqlite"}},
	// They run on every node, where all of Kubernetes' types are 40 MB that nobody needs.
	{"cmd/coild", []string{clientGo + "/kubernetes", clientGo + "/discovery"}},
	{"cmd/coil-router", []string{clientGo + "/kubernetes", clientGo + "/discovery"}},
	{"cmd/coil-egress", []string{clientGo + "/kubernetes", clientGo + "/discovery", sqlite, "pkg/store/sqlite"}},
	{"cmd/coild", controlled},
	{"cmd/coil-router", controlled},
	{"cmd/coil-egress", controlled},
	// It knows clouds, not clusters.
	{"pkg/openstack", []string{"k8s.io", "github.com/prometheus", "generated", "pkg/apis", "pkg/kube"}},
	{"cmd/", []string{"testing", "sigs.k8s.io/controller-runtime"}},
}

// pkg is what "go list" says about a package.
type pkg struct {
	ImportPath, Dir, Name     string
	GoFiles                   []string
	TestGoFiles, XTestGoFiles []string
	Imports, Deps             []string
}

// path is the import path inside the module.
func (p pkg) path() string { return local(p.ImportPath) }

// local takes the module off an import path.
func local(importPath string) string { return strings.TrimPrefix(importPath, module) }

// below reports whether a package is prefix or, if prefix ends in a slash, below it.
func below(path, prefix string) bool {
	if dir, ok := strings.CutSuffix(prefix, "/"); ok {
		return path == dir || strings.HasPrefix(path, prefix)
	}
	return path == prefix
}

// of reports whether an import path is a library or one of its packages.
func of(importPath, library string) bool {
	return importPath == library || strings.HasPrefix(importPath, library+"/")
}

// place returns the layer of a package of the module.
func place(path string) layer {
	best, found := "", unplaced
	for prefix, l := range places {
		if below(path, prefix) && len(prefix) > len(best) {
			best, found = prefix, l
		}
	}
	return found
}

// product reports whether a package is part of what users run.
func product(path string) bool {
	switch place(path) {
	case tool, support:
		return false
	}
	return true
}

// generated reports whether a generator wrote the package.
func generated(path string) bool { return below(path, "generated/") }

// importProblems returns what is wrong with the imports of a package.
func importProblems(p pkg) []string {
	var out []string
	from := place(p.path())
	if from == unplaced {
		return []string{fmt.Sprintf("%s has no place in the table of layers", p.path())}
	}
	for _, imp := range p.Imports {
		if strings.HasPrefix(imp, module) {
			if why := mayNot(p.path(), local(imp)); why != "" {
				out = append(out, fmt.Sprintf("%s imports %s: %s", p.path(), local(imp), why))
			}
			continue
		}
		for _, lib := range ioLibraries {
			// Of the API machinery pure packages need the types, which are data.
			if from == pure && imp != "net/netip" && (imp == lib || strings.Contains(lib, ".") && of(imp, lib)) {
				out = append(out, fmt.Sprintf("%s imports %s: it must not do I/O", p.path(), imp))
			}
		}
		for _, g := range gates {
			if product(p.path()) && of(imp, g.library) && p.path() != g.only {
				out = append(out, fmt.Sprintf("%s imports %s: only %s does", p.path(), imp, g.only))
			}
		}
	}
	return out
}

// mayNot says why a package of the module must not import another one; it is
// empty when it may.
func mayNot(from, to string) string {
	if !slices.Contains(lower[place(from)], place(to)) {
		return fmt.Sprintf("%s must not import %s", place(from), place(to))
	}
	if below(from, "pkg/apis/") {
		return "the API knows nothing else of this module"
	}
	for _, dir := range closed {
		if below(from, dir) && place(from) != support && !below(to, dir) && place(to) != pure && to != "pkg/atomicfile" {
			return dir + " imports pure packages and pkg/atomicfile only"
		}
	}
	for _, dir := range siblings {
		a, b := child(from, dir), child(to, dir)
		if a != "" && b != "" && a != b {
			return "packages below " + dir + " don't import each other"
		}
	}
	for _, two := range apart {
		if from == two[0] && to == two[1] || from == two[1] && to == two[0] {
			return "they know nothing of each other"
		}
	}
	if place(from) == useCase && place(to) == useCase && useCaseOf(from) != useCaseOf(to) &&
		!slices.Contains(useCases[useCaseOf(from)], useCaseOf(to)) {
		return "use-cases don't import each other"
	}
	return ""
}

// child is the name below dir that a package belongs to; it is empty for dir
// itself and for packages elsewhere.
func child(path, dir string) string {
	rest, ok := strings.CutPrefix(path, dir)
	if !ok {
		return ""
	}
	name, _, _ := strings.Cut(rest, "/")
	return name
}

// useCaseOf is the folder of places that a use-case is in.
func useCaseOf(path string) string {
	for prefix, l := range places {
		if l == useCase && below(path, prefix) {
			return prefix
		}
	}
	return ""
}

// linkProblems returns what a package links that it must not.
func linkProblems(p pkg) []string {
	var out []string
	for _, rule := range links {
		if !below(p.path(), rule.into) {
			continue
		}
		for _, dep := range p.Deps {
			for _, not := range rule.not {
				if of(local(dep), not) && !of(p.path(), not) {
					out = append(out, fmt.Sprintf("%s links %s", p.path(), local(dep)))
				}
			}
		}
	}
	return out
}
