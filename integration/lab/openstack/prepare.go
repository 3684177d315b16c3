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

	"github.com/coil-net/coil/integration/lab/cache"
	"github.com/coil-net/coil/integration/lab/scratch"
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
	root, err = cache.Once(ctx, "openstack", log, func(dir string) error { return unpack(ctx, log, dir) })
	if err != nil {
		return "", "", err
	}
	sum, err := sumOfFiles()
	if err != nil {
		return "", "", err
	}
	template, err = cache.Once(ctx, "openstack-template-"+sum, log, func(dir string) error { return makeTemplate(ctx, log, root, dir) })
	return root, template, err
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
func unpack(ctx context.Context, log io.Writer, dir string) error {
	downloads, err := scratch.New("coil-packages-")
	if err != nil {
		return err
	}
	defer downloads.Remove()
	debs, lists := downloads.Path("debs"), downloads.Path("lists")
	for _, d := range []string{filepath.Join(debs, "partial"), filepath.Join(lists, "partial"), dir} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	fmt.Fprintf(log, "downloading Debian's packages %s: some 40 MB\n", strings.Join(packages, ", "))
	// Nothing of the machine's own changes, and nothing needs root.
	options := []string{"-qq", "-y", "--no-install-recommends", "-o", "Debug::NoLocking=1", "-o", "APT::Sandbox::User=",
		"-o", "Dir::State::Lists=" + lists, "-o", "Dir::Cache=" + downloads.Path(), "-o", "Dir::Cache::Archives=" + debs}
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
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
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
