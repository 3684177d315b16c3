package openstack

import (
	"bytes"
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strings"
	"text/template"

	"golang.org/x/sys/unix"
)

//go:embed files
var embedded embed.FS

// packages are the Debian packages whose dependencies have all that is needed.
var packages = []string{"python3-neutron", "python3-keystone"}

// contents is the version of what populate makes: with another one, templates are made anew.
const contents = 2

// writeFiles writes the program that runs all others, and its files of configuration.
func writeFiles(c conf) error {
	names, err := fs.Glob(embedded, "files/*")
	if err != nil {
		return err
	}
	for _, name := range names {
		t, err := template.ParseFS(embedded, name)
		if err != nil {
			return err
		}
		var b bytes.Buffer
		if err := t.Execute(&b, c); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(c.Dir, filepath.Base(name)), b.Bytes(), 0o600); err != nil {
			return err
		}
	}
	return nil
}

// prepare returns the folder with the unpacked packages, and the one with databases in which the admin, the external network and
// some projects are. It makes what the cache lacks.
func prepare(ctx context.Context, log io.Writer) (root, template string, err error) {
	home, err := os.UserCacheDir()
	if err != nil {
		return "", "", fmt.Errorf("find the cache folder: %w; set HOME or XDG_CACHE_HOME", err)
	}
	cache := filepath.Join(home, "coil-openstack")
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", "", err
	}
	unlock, err := lock(filepath.Join(cache, "lock"))
	if err != nil {
		return "", "", err
	}
	defer unlock()
	root = filepath.Join(cache, "root")
	if err := once(root, func(dir string) error { return unpack(ctx, log, cache, dir) }); err != nil {
		return "", "", err
	}
	sum, err := sumOfFiles()
	if err != nil {
		return "", "", err
	}
	template = filepath.Join(cache, "template-"+sum)
	return root, template, once(template, func(dir string) error { return makeTemplate(ctx, log, root, dir) })
}

// once has a folder made, unless it is there. It is complete if it has its name.
func once(dir string, fill func(dir string) error) error {
	if _, err := os.Stat(dir); err == nil {
		return nil
	}
	unfinished := dir + ".new"
	if err := errors.Join(os.RemoveAll(unfinished), os.Mkdir(unfinished, 0o700)); err != nil {
		return err
	}
	if err := fill(unfinished); err != nil {
		return errors.Join(err, os.RemoveAll(unfinished))
	}
	return os.Rename(unfinished, dir)
}

// sumOfFiles names a template: with other files it is another one.
func sumOfFiles() (string, error) {
	h := sha256.New()
	fmt.Fprintln(h, contents)
	err := fs.WalkDir(embedded, ".", func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		b, err := embedded.ReadFile(path)
		fmt.Fprintln(h, path, len(b))
		h.Write(b)
		return err
	})
	return hex.EncodeToString(h.Sum(nil)[:6]), err
}

// unpack downloads the packages that this machine lacks, and unpacks them into dir.
func unpack(ctx context.Context, log io.Writer, cache, dir string) error {
	debs := filepath.Join(cache, "debs")
	lists := filepath.Join(cache, "lists")
	for _, d := range []string{filepath.Join(debs, "partial"), filepath.Join(lists, "partial")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	fmt.Fprintf(log, "downloading Debian's packages %s into %s: some 40 MB\n", strings.Join(packages, ", "), debs)
	// All of it is in the cache, and nothing needs root.
	options := []string{"-qq", "-y", "--no-install-recommends", "-o", "Debug::NoLocking=1", "-o", "APT::Sandbox::User=",
		"-o", "Dir::State::Lists=" + lists, "-o", "Dir::Cache=" + cache, "-o", "Dir::Cache::Archives=" + debs}
	for _, args := range [][]string{{"update"}, append([]string{"install", "--download-only"}, packages...)} {
		cmd := exec.CommandContext(ctx, "apt-get", slices.Concat(options, args)...)
		cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("apt-get %s: %w\n%s", args[0], err, out)
		}
	}
	files, err := filepath.Glob(filepath.Join(debs, "*.deb"))
	if err != nil {
		return err
	}
	fmt.Fprintf(log, "unpacking %d packages into %s\n", len(files), dir)
	for _, f := range files {
		if err := unpackOne(ctx, f, dir); err != nil {
			return fmt.Errorf("unpack %s: %w", f, err)
		}
	}
	return nil
}

// unpackOne unpacks the Python modules of a package, and what they read.
func unpackOne(ctx context.Context, deb, dir string) error {
	from := exec.CommandContext(ctx, "dpkg-deb", "--fsys-tarfile", deb)
	to := exec.CommandContext(ctx, "tar", "-x", "-C", dir, "--no-same-owner",
		"--exclude=./usr/share/doc*", "--exclude=./usr/share/man*", "--exclude=./usr/share/locale*")
	var said bytes.Buffer
	from.Stderr, to.Stderr = &said, &said
	pipe, err := from.StdoutPipe()
	if err != nil {
		return err
	}
	to.Stdin = pipe
	if err := from.Start(); err != nil {
		return err
	}
	err = to.Run()
	if err = errors.Join(err, from.Wait()); err != nil {
		return fmt.Errorf("%w\n%s", err, said.Bytes())
	}
	return nil
}

// makeTemplate makes databases, and keys of Keystone, and has what all clouds have put into them.
func makeTemplate(ctx context.Context, log io.Writer, root, dir string) error {
	fmt.Fprintln(log, "making the databases of Keystone and Neutron, once")
	p := programs{root: root}
	if err := p.configure(dir, 100); err != nil {
		return err
	}
	for _, d := range []string{"fernet", "credential", "lock"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o700); err != nil {
			return err
		}
	}
	me, err := user.Current()
	if err != nil {
		return err
	}
	// The numbers of user and group are taken, too.
	owner := []string{"--keystone-user", me.Uid, "--keystone-group", me.Gid}
	manage := []string{"manage", "--config-file", filepath.Join(dir, "keystone.conf")}
	for _, args := range [][]string{
		slices.Concat(manage, []string{"db_sync"}),
		slices.Concat(manage, []string{"fernet_setup"}, owner),
		slices.Concat(manage, []string{"credential_setup"}, owner),
		slices.Concat(manage, []string{"bootstrap", "--bootstrap-username", "admin", "--bootstrap-password", "admin", "--bootstrap-project-name", "admin",
			"--bootstrap-role-name", "admin", "--bootstrap-service-name", "keystone", "--bootstrap-region-id", region,
			"--bootstrap-public-url", p.IdentityURL() + "/v3"}),
		{"neutron-db", "sqlite:///" + filepath.Join(dir, "neutron.db")},
	} {
		if err := p.execute(ctx, args...); err != nil {
			return err
		}
	}
	keystone, neutron, err := p.run(ctx)
	defer kill(keystone, neutron)
	if err != nil {
		return err
	}
	return p.populate(ctx)
}

// execute runs a command of oslab.py to its end.
func (p *programs) execute(ctx context.Context, args ...string) error {
	c := p.command("setup.out", args...)
	cmd := exec.CommandContext(ctx, c.Path, c.Args...)
	cmd.Env = c.Env
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return nil
}

// lock takes the file lock at path: of several processes one fills the cache.
func lock(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	for {
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); !errors.Is(err, unix.EINTR) {
			if err != nil {
				f.Close()
				return nil, fmt.Errorf("lock %s: %w", path, err)
			}
			return func() { f.Close() }, nil
		}
	}
}
