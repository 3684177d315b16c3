package build

import (
	"bufio"
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
)

const (
	modulePath       = "github.com/coil-net/coil"
	kubernetesModule = "k8s.io/kubernetes"
)

// module is one of the nested modules that pin what the lab runs.
type module struct {
	name     string            // the directory's name
	dir      string            // absolute
	packages map[string]string // program name -> import path, from the tool directives
	version  string            // of the module that provides the programs
}

// Root returns the root directory of this repository: that of the working directory's module,
// else the place where this file was compiled.
func Root() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for ; ; dir = filepath.Dir(dir) {
		if isRoot(dir) {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			break
		}
	}
	if _, file, _, ok := runtime.Caller(0); ok {
		if dir := filepath.Join(filepath.Dir(file), "../../.."); isRoot(dir) {
			return dir, nil
		}
	}
	return "", fmt.Errorf("find the module %s: the lab builds from source; run it inside a checkout", modulePath)
}

func isRoot(dir string) bool {
	b, err := os.ReadFile(filepath.Join(dir, "go.mod"))
	return err == nil && bytes.HasPrefix(b, []byte("module "+modulePath+"\n"))
}

// KubernetesVersions lists the pinned releases, newest first.
func KubernetesVersions() ([]string, error) {
	all, err := loadModules()
	if err != nil {
		return nil, err
	}
	var versions []string
	for _, m := range all {
		if m.isKubernetes() {
			versions = append(versions, m.version)
		}
	}
	slices.SortFunc(versions, func(a, b string) int { return compareVersions(b, a) })
	return versions, nil
}

// modules returns the nested modules with the one selected Kubernetes among them.
func (b *Builder) modules() ([]module, error) {
	all, err := loadModules()
	if err != nil {
		return nil, err
	}
	versions, err := KubernetesVersions()
	if err != nil {
		return nil, err
	}
	selected, err := selectVersion(versions, b.KubernetesVersion)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(all, func(m module) bool {
		return m.isKubernetes() && m.version != selected
	}), nil
}

// selectVersion returns the newest of versions, which are sorted newest first, that begins with
// the components of want.
func selectVersion(versions []string, want string) (string, error) {
	want = strings.TrimPrefix(want, "v")
	for _, v := range versions {
		if n := strings.TrimPrefix(v, "v"); want == "" || n == want || strings.HasPrefix(n, want+".") {
			return v, nil
		}
	}
	return "", fmt.Errorf("select Kubernetes %q: the lab pins only %s", want, strings.Join(versions, ", "))
}

func loadModules() ([]module, error) {
	root, err := Root()
	if err != nil {
		return nil, err
	}
	files, err := filepath.Glob(filepath.Join(root, "integration/lab/build/modules/*/go.mod"))
	if err != nil {
		return nil, err
	}
	if len(files) == 0 {
		return nil, errors.New("no modules under integration/lab/build/modules: incomplete checkout")
	}
	var all []module
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			return nil, err
		}
		m, err := parseModule(b)
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", f, err)
		}
		m.dir = filepath.Dir(f)
		m.name = filepath.Base(m.dir)
		all = append(all, m)
	}
	return all, nil
}

// parseModule takes from a go.mod what its tool directives build and at which version.
func parseModule(mod []byte) (module, error) {
	m := module{packages: map[string]string{}}
	requires := map[string]string{}
	block := ""
	s := bufio.NewScanner(bytes.NewReader(mod))
	for s.Scan() {
		fields := strings.Fields(s.Text())
		if len(fields) == 0 || strings.HasPrefix(fields[0], "//") {
			continue
		}
		verb := block
		switch {
		case len(fields) == 2 && fields[1] == "(":
			block = fields[0]
			continue
		case fields[0] == ")":
			block = ""
			continue
		case block == "":
			verb, fields = fields[0], fields[1:]
		}
		switch {
		case verb == "tool" && len(fields) > 0:
			m.packages[programName(fields[0])] = fields[0]
		case verb == "require" && len(fields) > 1:
			requires[fields[0]] = fields[1]
		}
	}
	if err := s.Err(); err != nil {
		return module{}, err
	}
	for _, pkg := range m.packages {
		for mod, version := range requires {
			if pkg == mod || strings.HasPrefix(pkg, mod+"/") {
				m.version = version
			}
		}
	}
	if m.version == "" {
		return module{}, errors.New("no required module provides a tool")
	}
	return m, nil
}

// programName names the program of a main package as the field calls it.
func programName(pkg string) string {
	if pkg == "go.etcd.io/etcd/server/v3" {
		return "etcd"
	}
	return path.Base(pkg)
}

func (m module) isKubernetes() bool {
	for _, pkg := range m.packages {
		return strings.HasPrefix(pkg, kubernetesModule+"/")
	}
	return false
}

// flags are the build flags; they are part of the cache key.
func (m module) flags() []string {
	ld := "-s -w"
	if m.isKubernetes() {
		// kubectl can't parse the version that an unstamped build reports.
		for _, pkg := range []string{"k8s.io/component-base/version", "k8s.io/client-go/pkg/version"} {
			ld += " -X " + pkg + ".gitVersion=" + m.version
		}
	}
	return []string{"-mod=readonly", "-buildvcs=false", "-ldflags=" + ld}
}

// key identifies what the programs are built from and with.
func (m module) key(goVersion string) (string, error) {
	h := sha256.New()
	fmt.Fprintln(h, goVersion, runtime.GOOS, runtime.GOARCH, m.flags())
	for _, f := range []string{"go.mod", "go.sum"} {
		b, err := os.ReadFile(filepath.Join(m.dir, f))
		if err != nil {
			return "", err
		}
		fmt.Fprintln(h, f, len(b))
		h.Write(b)
	}
	return hex.EncodeToString(h.Sum(nil)[:6]), nil
}

// compareVersions orders release versions such as v1.36.3 by their numbers.
func compareVersions(a, b string) int {
	x, y := strings.Split(strings.TrimPrefix(a, "v"), "."), strings.Split(strings.TrimPrefix(b, "v"), ".")
	for i := range min(len(x), len(y)) {
		m, _ := strconv.Atoi(x[i])
		n, _ := strconv.Atoi(y[i])
		if c := cmp.Compare(m, n); c != 0 {
			return c
		}
	}
	return cmp.Compare(len(x), len(y))
}
