package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/mod/semver"
)

// source is what a release is made from: a commit, and nothing beside it.
type source struct {
	version string // such as v3.0.0
	commit  string
	time    time.Time // of the commit
}

// findSource reads the commit that is checked out in root. version is what the release shall be called; if it is empty,
// the commit's tag says it.
func findSource(ctx context.Context, root, version string) (source, error) {
	changes, err := git(ctx, root, "status", "--porcelain")
	if err != nil {
		return source{}, err
	}
	if changes != "" {
		return source{}, fmt.Errorf("a release is made from a commit, but these files differ from it: commit them, or put them aside by git stash --include-untracked\n%s", changes)
	}
	tags, err := git(ctx, root, "tag", "--points-at", "HEAD")
	if err != nil {
		return source{}, err
	}
	if version, err = chooseVersion(version, strings.Fields(tags)); err != nil {
		return source{}, err
	}
	head, err := git(ctx, root, "log", "-1", "--no-show-signature", "--format=%H %ct")
	if err != nil {
		return source{}, err
	}
	commit, seconds, _ := strings.Cut(head, " ")
	unix, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil {
		return source{}, fmt.Errorf("time of the commit: %w", err)
	}
	return source{version: version, commit: commit, time: time.Unix(unix, 0).UTC()}, nil
}

// chooseVersion returns the version of a commit that has tags. wanted is the one that was asked for, if any.
func chooseVersion(wanted string, tags []string) (string, error) {
	versions := slices.DeleteFunc(slices.Clone(tags), func(tag string) bool { return !isVersion(tag) })
	switch {
	case wanted != "" && !isVersion(wanted):
		return "", fmt.Errorf("version %q: write it in full, such as v3.0.0 or v3.1.0-rc.1 (semver.org), without build metadata, which tags of images can't have", wanted)
	case wanted != "" && len(versions) > 0 && !slices.Contains(versions, wanted):
		return "", fmt.Errorf("version %s: the commit has the tag %s already; leave the version away, or check another commit out", wanted, strings.Join(versions, ", "))
	case wanted != "":
		return wanted, nil
	case len(versions) == 1:
		return versions[0], nil
	case len(versions) > 1:
		return "", fmt.Errorf("the commit has the tags %s: say which by VERSION=%s", strings.Join(versions, ", "), versions[0])
	}
	return "", fmt.Errorf("none of the commit's tags %q is a version: make one by git tag v3.0.0, or say VERSION=v3.0.0", tags)
}

// isVersion reports whether v is a semantic version with all its three numbers, after a v.
func isVersion(v string) bool { return semver.IsValid(v) && semver.Canonical(v) == v }

// git returns what a git command prints, without space around it.
func git(ctx context.Context, dir string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "git", args...)
	cmd.Dir = dir
	out, err := cmd.Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return "", fmt.Errorf("git %s: %w\n%s", args[0], err, exit.Stderr)
	}
	return strings.TrimSpace(string(out)), err
}
