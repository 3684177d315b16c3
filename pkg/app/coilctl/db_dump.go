package coilctl

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/term"
	corev1 "k8s.io/api/core/v1"

	"github.com/coil-net/coil/pkg/plan/inspection"
)

// standardOutput is the name of a file that stands for it.
const standardOutput = "-"

// dump gets the record of a node.
func (o *dbOptions) dump(ctx context.Context, node string) error {
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	file := o.file
	switch {
	case file == "" && o.format != formatTable:
		file = standardOutput
	case file == "":
		file = node + ".db"
	}
	if f, is := o.Out.(*os.File); file == standardOutput && o.format == formatTable && is && term.IsTerminal(int(f.Fd())) {
		return errTerminal
	}
	if _, err := os.Lstat(file); file != standardOutput && !o.force && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s is there already: use another name, or --force", file)
	}
	coild, err := o.coild(ctx, node)
	if err != nil {
		return err
	}
	write := func(w io.Writer) error { return o.copyTo(ctx, coild, w) }
	if o.format != formatTable {
		write = func(w io.Writer) error { return o.rowsTo(ctx, coild, w) }
	}
	if file == standardOutput {
		return write(o.Out)
	}
	if err := writeNew(file, o.force, write); err != nil {
		return err
	}
	printf(o.ErrOut, "%s has the record of node %s\n", file, node)
	return nil
}

// rowsTo prints the rows of the record of a pod of coild.
func (o *dbOptions) rowsTo(ctx context.Context, coild *corev1.Pod, w io.Writer) error {
	out := &bounded{left: inspection.DatabaseLimit}
	if err := o.ask(ctx, coild, out, &bounded{left: complaintsLimit}, "record"); err != nil {
		return err
	}
	d, err := inspection.ParseDatabase(out.Bytes())
	if err != nil {
		return err
	}
	if d.Truncated != "" {
		printf(o.ErrOut, "%s\n", d.Truncated)
	}
	to := *o.tool
	to.Out = w
	return to.print(d, nil, nil)
}

// copyTo writes a copy of the record of a pod of coild, and checks that it is whole.
func (o *dbOptions) copyTo(ctx context.Context, coild *corev1.Pod, w io.Writer) error {
	got, complaints := &summed{to: w, sum: sha256.New()}, &bounded{left: complaintsLimit}
	if err := o.ask(ctx, coild, got, complaints, "db"); err != nil {
		return err
	}
	want, err := inspection.FindSum(complaints.String())
	if err != nil {
		return fmt.Errorf("the copy can't be checked: %w", err)
	}
	if have := (inspection.Sum{Bytes: got.bytes, SHA256: hex.EncodeToString(got.sum.Sum(nil))}); have != want {
		return fmt.Errorf("the copy isn't whole, try again: %s was sent, and %s has come", want, have)
	}
	return nil
}

// summed counts what is written, and sums it up. It takes no more than a copy may have.
type summed struct {
	to    io.Writer
	sum   hash.Hash
	bytes int64
}

// Write implements io.Writer.
func (s *summed) Write(p []byte) (int, error) {
	if s.bytes+int64(len(p)) > inspection.CopyLimit {
		return 0, io.ErrShortBuffer
	}
	n, err := s.to.Write(p)
	s.sum.Write(p[:n])
	s.bytes += int64(n)
	return n, err
}

// writeNew has a file written under another name, for its owner alone, and gives it its own when it is whole.
func writeNew(file string, replace bool, write func(io.Writer) error) (err error) {
	f, err := os.CreateTemp(filepath.Dir(file), "."+filepath.Base(file)+".*")
	if err != nil {
		return err
	}
	defer func() {
		if rerr := os.Remove(f.Name()); !errors.Is(rerr, fs.ErrNotExist) {
			err = errors.Join(err, rerr)
		}
	}()
	if err := errors.Join(write(f), f.Close()); err != nil {
		return err
	}
	if replace {
		return os.Rename(f.Name(), file)
	}
	return os.Link(f.Name(), file) // unlike Rename it fails if somebody has made one meanwhile
}
