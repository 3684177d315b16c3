package coilctl

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/testkit"
)

// run runs coilctl.
func run(in string, args ...string) (code int, out, errOut string) {
	var o, e bytes.Buffer
	code = Main(append([]string{"coilctl"}, args...), strings.NewReader(in), &o, &e)
	return code, o.String(), e.String()
}

// The page's example yields what the page says.
func TestConvertPage(t *testing.T) {
	const page = "../../../cmd/coil-egress-controller/COMING-FROM.md"
	text := string(testkit.Must(os.ReadFile(page))(t))
	_, part, _ := strings.Cut(text, "\n## Converting objects\n")
	part, _, _ = strings.Cut(part, "\n## ")
	blocks := regexp.MustCompile("(?ms)^```(?:yaml|console)\n(.*?)^```$").FindAllStringSubmatchIndex(part, -1)
	if len(blocks) != 4 {
		t.Fatalf("the part has %d blocks", len(blocks))
	}
	block := func(i int) string { return part[blocks[i][2]:blocks[i][3]] }
	input := block(1)
	if !strings.HasPrefix(input, "# partners.yaml\n") {
		t.Fatalf("the input is %s", input)
	}
	command, _, _ := strings.Cut(block(2), "\n")
	args, ok := strings.CutPrefix(command, "$ coilctl ")
	args, toFile := strings.CutSuffix(args, " > coil.yaml")
	if !ok || !toFile {
		t.Fatalf("the command is %s", command)
	}
	t.Chdir(t.TempDir())
	testkit.Check(t, os.WriteFile("partners.yaml", []byte(input), 0o644))
	code, out, errOut := run("", strings.Fields(args)...)
	if code != noCounterpart {
		t.Errorf("the exit code is %d: %s", code, errOut)
	}
	if diff := cmp.Diff(block(2), command+"\n"+errOut); diff != "" {
		t.Errorf("notes (-page +got):\n%s", diff)
	}
	if diff := cmp.Diff(block(3), out); diff != "" {
		t.Errorf("objects (-page +got):\n%s", diff)
	}
}

// Files, folders and the standard input are read; other files of a folder aren't.
func TestConvertInputs(t *testing.T) {
	const egress = "apiVersion: staticegressips.nirmata.io/v1alpha1\nkind: StaticEgressIP\nmetadata: {name: NAME}\nspec: {rules: [{egressip: 198.51.100.1, service-name: NAME, cidr: 203.0.113.0/24}]}\n"
	dir := t.TempDir()
	for file, name := range map[string]string{"a.yaml": "a", "b.yml": "b", "c.json": "c", "d.txt": "d"} {
		testkit.Check(t, os.WriteFile(filepath.Join(dir, file), []byte(strings.ReplaceAll(egress, "NAME", name)), 0o644))
	}
	code, out, errOut := run(strings.ReplaceAll(egress, "NAME", "e"), "convert", "-f", dir, "-f", "-", "-n", "team", "-o", "json", "--on-failure", "Node")
	if code != 0 || errOut != "" {
		t.Errorf("exit code %d: %s", code, errOut)
	}
	for _, want := range []string{`"name": "a-0"`, `"name": "b-0"`, `"name": "c-0"`, `"name": "e-0"`, `"namespace": "team"`, `"onFailure": "Node"`, "(standard input:1)"} {
		if !strings.Contains(out, want) {
			t.Errorf("%s isn't in %s", want, out)
		}
	}
	if strings.Contains(out, `"name": "d-0"`) {
		t.Errorf("d.txt was read: %s", out)
	}
}

// Folders below a folder are read with -R only, as by kubectl, and in its order. A folder may be a link, and a file that is named have any name.
func TestConvertRecursive(t *testing.T) {
	const egress = "apiVersion: staticegressips.nirmata.io/v1alpha1\nkind: StaticEgressIP\nmetadata: {name: NAME}\nspec: {rules: [{egressip: 198.51.100.1, service-name: NAME, cidr: 203.0.113.0/24}]}\n"
	t.Chdir(t.TempDir())
	testkit.Check(t, os.MkdirAll("all/b.yaml/deep", 0o755), os.Symlink("all", "link"))
	for file, name := range map[string]string{"all/c.yaml": "c", "all/b.yaml/b.json": "b", "all/b.yaml/deep/a.yml": "a", "all/b.yaml/d.txt": "d"} {
		testkit.Check(t, os.WriteFile(file, []byte(strings.ReplaceAll(egress, "NAME", name)), 0o644))
	}
	for args, want := range map[string]string{
		"-f all": "all/c.yaml", "-f link": "link/c.yaml", "-f all/b.yaml/d.txt -R": "all/b.yaml/d.txt",
		"-f all -R": "all/b.yaml/b.json all/b.yaml/deep/a.yml all/c.yaml", "-f link/ --recursive": "link/b.yaml/b.json link/b.yaml/deep/a.yml link/c.yaml",
	} {
		code, out, errOut := run("", append([]string{"convert"}, strings.Fields(args)...)...)
		var files []string
		first, _, _ := strings.Cut(out, "\n")
		for _, m := range regexp.MustCompile(`\(([^()]*):1\)`).FindAllStringSubmatch(first, -1) {
			files = append(files, m[1])
		}
		if got := strings.Join(files, " "); code != 0 || got != want {
			t.Errorf("%s: exit code %d, it reads %q, want %q: %s%s", args, code, got, want, errOut, out)
		}
	}
}

// The exit code and the standard error tell what happened. After an error nothing is written.
func TestConvertExitCodes(t *testing.T) {
	const (
		head   = "apiVersion: staticegressips.nirmata.io/v1alpha1\nkind: StaticEgressIP\nmetadata: {name: eip}\nspec: "
		fine   = head + "{rules: [{egressip: 198.51.100.1, service-name: web, cidr: 203.0.113.0/24}]}\n"
		differ = head + "{rules: [{egressip: 198.51.100.1, service-name: web, cidr: 203.0.113.1/24}]}\n"
		lost   = head + "{rules: [{egressip: 198.51.100.1, service-name: web, cidr: 203.0.113.0/24, mark: 1}]}\n"
		other  = "---\napiVersion: v1\nkind: Service\nmetadata: {name: web}\n"
	)
	for name, c := range map[string]struct {
		in   string
		args []string
		code int
		told string
		out  bool
	}{
		"fine":                 {fine, nil, 0, "", true},
		"another way":          {differ, nil, 0, "StaticEgressIP default/eip (standard input:1)\n  spec.rules[0].cidr: look at it: 203.0.113.1/24 has host bits", true},
		"no counterpart":       {lost, nil, 3, "  spec.rules[0].mark: no counterpart: this field isn't one of the StaticEgressIP's\n    to do: see whether it is misspelt, or take it out\nerror: values without a counterpart: 1\n", true},
		"fine and strict":      {fine + other, []string{"--strict"}, 0, "ignored: 1 of Service (v1)\n", true},
		"another way, strict":  {differ, []string{"--strict"}, 1, "error: nothing is written, since --strict is set and notes were told: 1\n", false},
		"nothing to convert":   {other, nil, 1, "ignored: 1 of Service (v1)\nerror: the input has nothing of egressgateway.spidernet.io nor of staticegressips.nirmata.io to convert\n", false},
		"an error":             {fine + "---\n\nkind: [", nil, 1, "error: standard input: document 2, line 7: ", false},
		"no file":              {"", []string{"-f", "missing.yaml"}, 1, "error: stat missing.yaml: no such file or directory\n", false},
		"another format":       {fine, []string{"-o", "table"}, 1, "error: --output can't be \"table\": choose yaml or json\n", false},
		"a bad namespace":      {fine, []string{"--egress-namespace", "A"}, 1, "error: --egress-namespace can't be \"A\": ", false},
		"another on-failure":   {fine, []string{"--on-failure", "Open"}, 1, "error: --on-failure can't be \"Open\": choose Closed or Node\n", false},
		"an argument too much": {fine, []string{"x"}, 1, "error: unknown command \"x\" for \"coilctl convert\"", false},
	} {
		t.Run(name, func(t *testing.T) {
			code, out, errOut := run(c.in, append([]string{"convert", "-f", "-"}, c.args...)...)
			if code != c.code || !strings.Contains(errOut, c.told) || c.told == "" && errOut != "" || (out != "") != c.out {
				t.Errorf("exit code %d, %d bytes written, and it tells %s", code, len(out), errOut)
			}
		})
	}
	if code, out, errOut := run("", "convert"); code != 1 || out != "" || errOut != "error: -f is required: a file, a folder, or - for the standard input\n" {
		t.Errorf("without -f: %d, %s%s", code, out, errOut)
	}
}
