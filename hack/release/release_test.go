package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/mod/modfile"
	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/yaml"

	"github.com/coil-net/coil/hack/pack"
	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/pkg/testkit"
)

const (
	testVersion = "v9.8.7-test.1"
	testImage   = "registry.example/coil"
)

// TestRelease makes a release of what is committed, twice, from clones in different folders: one that has a tag, and one
// that is told the version. In the long form both are made by the clones' own programs, and nothing that was compiled for
// the first is used for the second.
func TestRelease(t *testing.T) {
	testkit.Need(t, testkit.APIServer)
	hermetic(t)
	root := testkit.Must(build.Root())(t)
	archs := []string{runtime.GOARCH}
	if testkit.ReleaseForm.Long() {
		archs = []string{"amd64", "arm64"}
	}
	var clones, outs [2]string
	for i := range outs {
		clone := filepath.Join(t.TempDir(), strings.Repeat("x", i), "coil")
		mustGit(t, root, "clone", "--quiet", "--no-tags", root, clone)
		args := []string{"run", "./hack/release", "-image=" + testImage, "-archs=" + strings.Join(archs, ",")}
		env := append(os.Environ(), "CGO_ENABLED=0")
		if i == 0 {
			mustGit(t, clone, "tag", testVersion)
		} else {
			args = append(args, "-version="+testVersion)
			if testkit.ReleaseForm.Long() {
				env = append(env, "GOCACHE="+t.TempDir())
			}
		}
		begin := time.Now()
		if i == 0 || testkit.ReleaseForm.Long() {
			cmd := exec.CommandContext(t.Context(), "go", args...)
			cmd.Dir, cmd.Env = clone, env
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("go %q: %v\n%s", args, err, out)
			}
		} else {
			t.Chdir(clone)
			testkit.Check(t, run(t.Context(), args[2:]))
		}
		t.Logf("release %d: %v", i+1, time.Since(begin).Round(time.Second))
		clones[i], outs[i] = clone, filepath.Join(clone, "build", "release")
	}
	t.Run("files", func(t *testing.T) { checkFiles(t, outs, archs) })
	t.Run("checksums", func(t *testing.T) { checkSums(t, outs[0]) })
	t.Run("manifests", func(t *testing.T) { checkManifests(t, outs[0]) })
	for _, arch := range archs {
		t.Run(arch, func(t *testing.T) {
			programs := t.TempDir()
			unpack(t, filepath.Join(outs[0], "coil-image-"+arch+".tar"), programs)
			files := map[string]string{} // by the program, the file that releases have of it
			for _, s := range singles(arch) {
				if s.system == "linux/"+arch {
					testkit.Check(t, os.Link(filepath.Join(outs[0], s.file()), filepath.Join(programs, s.file())))
					files[s.program] = s.file()
				}
			}
			checkPrograms(t, clones[0], programs, arch, files)
			checkSBOM(t, clones[0], programs, arch)
		})
	}
}

// checkFiles checks that both releases have the same files, which are those that there should be.
func checkFiles(t *testing.T, outs [2]string, archs []string) {
	want := []string{"SHA256SUMS", "coil-cleanup.yaml", "coil-crds.yaml", "coil-egress-only-with-addresses.yaml", "coil-egress-only.yaml", "coil-ipam-only-with-router.yaml",
		"coil-ipam-only.yaml", "coil-lb-agent.service", "coil-lb-controller.service", "coil-with-gateways.yaml", "coil-with-router.yaml", "coil-with-services.yaml", "coil.yaml"}
	for _, arch := range archs {
		want = append(want, "coil-image-"+arch+".tar", "coil-sbom-"+arch+".cdx.json", "coil-lb-agent-linux-"+arch, "coil-lb-controller-linux-"+arch, "coil-migrator-linux-"+arch, "coilctl-linux-"+arch)
		if arch == "arm64" {
			want = append(want, "coil-migrator-darwin-arm64", "coilctl-darwin-arm64")
		}
	}
	slices.Sort(want)
	var hashes [2][]string
	for i, out := range outs {
		var names []string
		for _, e := range testkit.Must(os.ReadDir(out))(t) {
			names = append(names, e.Name())
			b := testkit.Must(os.ReadFile(filepath.Join(out, e.Name())))(t)
			hashes[i] = append(hashes[i], fmt.Sprintf("%s %d bytes, SHA-256 %x", e.Name(), len(b), sha256.Sum256(b)))
		}
		if diff := cmp.Diff(want, names); diff != "" {
			t.Errorf("files (-want +got):\n%s", diff)
		}
	}
	if diff := cmp.Diff(hashes[0], hashes[1]); diff != "" {
		t.Errorf("the releases of two clones differ (-first +second):\n%s", diff)
	}
}

// checkSums lets sha256sum(1) check the files, and one that was changed.
func checkSums(t *testing.T, out string) {
	check := func() (string, error) {
		cmd := exec.CommandContext(t.Context(), "sha256sum", "--check", "--strict", sums)
		cmd.Dir = out
		said, err := cmd.CombinedOutput()
		return string(said), err
	}
	said, err := check()
	if files := len(testkit.Must(os.ReadDir(out))(t)) - 1; err != nil || strings.Count(said, ": OK\n") != files {
		t.Errorf("sha256sum: %v, want that all %d files are OK:\n%s", err, files, said)
	}
	file := filepath.Join(out, "coil.yaml")
	before := testkit.Must(os.ReadFile(file))(t)
	testkit.Check(t, os.WriteFile(file, append(slices.Clone(before), '\n'), 0o644))
	if said, err := check(); err == nil || !strings.Contains(said, "coil.yaml: FAILED") {
		t.Errorf("sha256sum: %v, want that the changed coil.yaml has failed:\n%s", err, said)
	}
	testkit.Check(t, os.WriteFile(file, before, 0o644))
}

// checkManifests checks that manifests consist of objects, and that all containers have the release's image.
func checkManifests(t *testing.T, out string) {
	for file, workloads := range map[string]int{
		"coil.yaml": 3, "coil-with-router.yaml": 4, "coil-with-services.yaml": 4, "coil-with-gateways.yaml": 5, "coil-ipam-only.yaml": 2, "coil-ipam-only-with-router.yaml": 3,
		"coil-egress-only.yaml": 2, "coil-egress-only-with-addresses.yaml": 3, "coil-cleanup.yaml": 1, "coil-crds.yaml": 0,
	} {
		objects, found := 0, 0
		dec := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(testkit.Must(os.ReadFile(filepath.Join(out, file)))(t)), 4096)
		for ; ; objects++ {
			var u unstructured.Unstructured
			if err := dec.Decode(&u); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			if u.GetKind() == "" || u.GetName() == "" {
				t.Errorf("%s: object %d has the kind %q and the name %q", file, objects, u.GetKind(), u.GetName())
			}
			if u.GetKind() != "DaemonSet" && u.GetKind() != "Deployment" {
				continue
			}
			found++
			var w appsv1.DaemonSet // the templates of both kinds are at the same place
			testkit.Check(t, apiruntime.DefaultUnstructuredConverter.FromUnstructured(u.Object, &w))
			for _, c := range slices.Concat(w.Spec.Template.Spec.InitContainers, w.Spec.Template.Spec.Containers) {
				if want := testImage + ":" + testVersion; c.Image != want {
					t.Errorf("%s: container %s of %s has the image %q, want %q", file, c.Name, u.GetName(), c.Image, want)
				}
			}
		}
		if objects == 0 || found != workloads {
			t.Errorf("%s: %d objects, %d of them workloads; want some, and %d workloads", file, objects, found, workloads)
		}
	}
}

// unpack puts the programs of an image into a folder, and checks the image's name.
func unpack(t *testing.T, archive, dir string) {
	t.Helper()
	entries := map[string][]byte{}
	for h, b := range tarEntries(t, testkit.Must(os.ReadFile(archive))(t)) {
		entries[h.Name] = b
	}
	var images []struct{ RepoTags, Layers []string }
	testkit.Check(t, json.Unmarshal(entries["manifest.json"], &images))
	if len(images) != 1 || len(images[0].Layers) != 1 || !slices.Equal(images[0].RepoTags, []string{testImage + ":" + testVersion}) {
		t.Fatalf("the archive has the images %+v, want one layer of %s:%s", images, testImage, testVersion)
	}
	for h, b := range tarEntries(t, entries[images[0].Layers[0]]) {
		path := filepath.Join(dir, h.Name)
		if h.Typeflag == tar.TypeLink {
			testkit.Check(t, os.Link(filepath.Join(dir, h.Linkname), path))
			continue
		}
		testkit.Check(t, os.WriteFile(path, b, 0o755))
	}
}

// tarEntries yields the entries of an archive.
func tarEntries(t *testing.T, archive []byte) func(yield func(*tar.Header, []byte) bool) {
	return func(yield func(*tar.Header, []byte) bool) {
		for r := tar.NewReader(bytes.NewReader(archive)); ; {
			h, err := r.Next()
			if errors.Is(err, io.EOF) {
				return
			}
			testkit.Check(t, err)
			if !yield(h, testkit.Must(io.ReadAll(r))(t)) {
				return
			}
		}
	}
}

// joint are the programs of cmd/ that exist by the names of their parts only.
var joint = []string{"coil-controllers", "coil-routers"}

// checkPrograms checks that a folder has all programs, each of which is of the architecture and prints the version. files are the file names of some, by program.
func checkPrograms(t *testing.T, root, dir, arch string, files map[string]string) {
	var want, got []string
	named := map[string]string{} // programs by the names of files
	for program, file := range files {
		want, named[file] = append(want, file), program
	}
	for _, main := range testkit.Must(filepath.Glob(filepath.Join(root, "cmd", "*", "main.go")))(t) {
		if name := filepath.Base(filepath.Dir(main)); !slices.Contains(joint, name) && !slices.Contains(pack.Tools, name) {
			want = append(want, name)
		}
	}
	slices.Sort(want)
	machine := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}[arch]
	for _, e := range testkit.Must(os.ReadDir(dir))(t) {
		got = append(got, e.Name())
		path := filepath.Join(dir, e.Name())
		f := testkit.Must(elf.Open(path))(t)
		testkit.Check(t, f.Close())
		if f.Machine != machine {
			t.Errorf("%s is for %s, want %s", e.Name(), f.Machine, machine)
		}
		if arch != runtime.GOARCH { // it can't run here
			if !bytes.Contains(testkit.Must(os.ReadFile(path))(t), []byte(testVersion)) {
				t.Errorf("%s doesn't have the version %s", e.Name(), testVersion)
			}
			continue
		}
		out, err := exec.CommandContext(t.Context(), path, "--version").Output()
		name := e.Name()
		if program, ok := named[name]; ok {
			name = program
		}
		if want := name + " " + testVersion + "\n"; err != nil || string(out) != want {
			t.Errorf("%s --version prints %q (%v), want %q", e.Name(), out, err, want)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("programs (-want +got):\n%s", diff)
	}
}

// checkSBOM compares the list with the files of the programs, with what go.mod requires, and with what the go command
// says that programs link.
func checkSBOM(t *testing.T, root, programs, arch string) {
	file := filepath.Join(root, "build", "release", "coil-sbom-"+arch+".cdx.json")
	var bom cdx.BOM
	testkit.Check(t, cdx.NewBOMDecoder(bytes.NewReader(testkit.Must(os.ReadFile(file))(t)), cdx.BOMFileFormatJSON).Decode(&bom))
	committed := testkit.Must(findSource(t.Context(), root, ""))(t).time.Format(time.RFC3339)
	if m := bom.Metadata; m.Component.Version != testVersion || bom.SerialNumber != "" || m.Timestamp != committed {
		t.Errorf("the document is of version %s, number %q, time %s; want %s, none, %s",
			m.Component.Version, bom.SerialNumber, m.Timestamp, testVersion, committed)
	}
	versions, hashes := map[string]string{}, map[string]string{}
	for _, c := range *bom.Components {
		versions[c.Name] = c.Version
		if c.Type == cdx.ComponentTypeApplication {
			hashes[c.Name] = (*c.Hashes)[0].Value
		}
	}
	for _, e := range testkit.Must(os.ReadDir(programs))(t) {
		name := e.Name()
		if got := fmt.Sprintf("%x", sha256.Sum256(testkit.Must(os.ReadFile(filepath.Join(programs, e.Name())))(t))); hashes[name] != got {
			t.Errorf("%s has the SHA-256 %s, the list says %q", name, got, hashes[name])
		}
	}
	cmd := exec.CommandContext(t.Context(), "go", "list", "-deps", "-tags=grpcnotrace", "-f={{with .Module}}{{.Path}}{{end}}", "./cmd/...")
	cmd.Dir, cmd.Env = root, append(os.Environ(), "GOARCH="+arch, "CGO_ENABLED=0")
	linked := strings.Fields(string(testkit.Must(cmd.Output())(t)))
	mod := testkit.Must(modfile.Parse("go.mod", testkit.Must(os.ReadFile(filepath.Join(root, "go.mod")))(t), nil))(t)
	direct := 0
	for _, r := range mod.Require {
		if !slices.Contains(linked, r.Mod.Path) {
			if v, ok := versions[r.Mod.Path]; ok {
				t.Errorf("the list names %s %s, which no program links", r.Mod.Path, v)
			}
			continue
		}
		if versions[r.Mod.Path] != r.Mod.Version {
			t.Errorf("the list has %s %q, go.mod requires %s", r.Mod.Path, versions[r.Mod.Path], r.Mod.Version)
		}
		if !r.Indirect {
			direct++
		}
	}
	if direct == 0 || versions["std"] != strings.TrimPrefix(runtime.Version(), "go") {
		t.Errorf("%d direct modules and std %s are listed, want some and that of %s", direct, versions["std"], runtime.Version())
	}
}
