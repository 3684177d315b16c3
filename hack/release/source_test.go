package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coil-net/coil/pkg/testkit"
)

func TestChooseVersion(t *testing.T) {
	for _, tt := range []struct {
		name    string
		wanted  string
		tags    []string
		want    string
		problem string // part of the error
	}{
		{name: "tag", tags: []string{"v3.0.0"}, want: "v3.0.0"},
		{name: "tag among others", tags: []string{"nightly", "v3.0.0", "v3.0"}, want: "v3.0.0"},
		{name: "version without a tag", wanted: "v3.1.0-rc.1", want: "v3.1.0-rc.1"},
		{name: "version beside another tag", wanted: "v3.1.0", tags: []string{"nightly"}, want: "v3.1.0"},
		{name: "one of two tags", wanted: "v3.1.0", tags: []string{"v3.1.0-rc.1", "v3.1.0"}, want: "v3.1.0"},
		{name: "neither", problem: "git tag v3.0.0"},
		{name: "no tag is a version", tags: []string{"3.0.0", "nightly"}, problem: `["3.0.0" "nightly"]`},
		{name: "two tags", tags: []string{"v3.1.0-rc.1", "v3.1.0"}, problem: "VERSION=v3.1.0-rc.1"},
		{name: "another tag", wanted: "v3.0.1", tags: []string{"v3.0.0"}, problem: "the commit has the tag v3.0.0"},
		{name: "no v", wanted: "3.0.0", problem: "v3.0.0"},
		{name: "two numbers", wanted: "v3.0", problem: "in full"},
		{name: "leading zero", wanted: "v3.01.0", problem: "in full"},
		{name: "build metadata", wanted: "v3.0.0+1", problem: "build metadata"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := chooseVersion(tt.wanted, tt.tags)
			if got != tt.want || (err != nil) != (tt.problem != "") || err != nil && !strings.Contains(err.Error(), tt.problem) {
				t.Errorf("version %q, error %v; want %q, an error with %q", got, err, tt.want, tt.problem)
			}
		})
	}
}

func TestFindSource(t *testing.T) {
	hermetic(t)
	t.Setenv("GIT_COMMITTER_DATE", "@1700000000 +0100")
	repo := t.TempDir()
	mustGit(t, repo, "init", "--quiet")
	testkit.Check(t, os.WriteFile(filepath.Join(repo, ".gitignore"), []byte("/build/\n"), 0o644))
	mustGit(t, repo, "add", ".")
	mustGit(t, repo, "commit", "--quiet", "--message=first")
	mustGit(t, repo, "tag", "v1.2.3")
	commit := mustGit(t, repo, "rev-parse", "HEAD")
	testkit.Check(t, os.Mkdir(filepath.Join(repo, "build"), 0o755), os.WriteFile(filepath.Join(repo, "build", "out"), nil, 0o644))

	got, err := findSource(t.Context(), repo, "")
	if err != nil {
		t.Fatal(err)
	}
	if got.version != "v1.2.3" || got.commit != commit || got.time.Unix() != 1700000000 {
		t.Errorf("source %+v, want v1.2.3 of %s at 1700000000", got, commit)
	}
	testkit.Check(t, os.WriteFile(filepath.Join(repo, "new.go"), nil, 0o644))
	if _, err := findSource(t.Context(), repo, ""); err == nil || !strings.Contains(err.Error(), "new.go") {
		t.Errorf("error %v, want one that names the file new.go", err)
	}
	if _, err := findSource(t.Context(), t.TempDir(), "v1.2.3"); err == nil || !strings.Contains(err.Error(), "not a git repository") {
		t.Errorf("error %v, want git's about the folder that is no repository", err)
	}
}

// hermetic keeps this machine's configuration of git away, and lets git read checkouts of other users.
func hermetic(t *testing.T) {
	t.Helper()
	config := filepath.Join(t.TempDir(), "gitconfig")
	testkit.Check(t, os.WriteFile(config, []byte("[safe]\n\tdirectory = *\n[user]\n\tname = test\n\temail = test@example.org\n"), 0o644))
	t.Setenv("GIT_CONFIG_GLOBAL", config)
	t.Setenv("GIT_CONFIG_NOSYSTEM", "1")
}

func mustGit(t *testing.T, dir string, args ...string) string {
	t.Helper()
	return testkit.Must(git(t.Context(), dir, args...))(t)
}
