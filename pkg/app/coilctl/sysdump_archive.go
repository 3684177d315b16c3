package coilctl

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/sysdump"
)

// entry is a file of an archive, and how its content is read. What is read before an error is kept.
type entry struct {
	name  string
	limit int64
	read  func(ctx context.Context, w io.Writer) error
}

const (
	// root is the folder that an archive has everything in.
	root = "coil-sysdump/"
	// readers is how many files are read at once, and wait on the disk to be written.
	readers = 4
	// readWithin is for how long a file is read.
	readWithin = 2 * time.Minute
	// lineLimit is the longest line whose tokens are surely found.
	lineLimit = 1 << 20
)

// archive writes files one after the other, in the order in which they are given.
type archive struct {
	zip      *gzip.Writer
	tar      *tar.Writer
	at       time.Time
	progress func(done, all int, name string)
	// files counts those that were read as a whole, and problems are what wasn't.
	files    int
	index    []string
	problems []string
}

func newArchive(w io.Writer, at time.Time, progress func(done, all int, name string)) *archive {
	zip := gzip.NewWriter(w)
	return &archive{zip: zip, tar: tar.NewWriter(zip), at: at, progress: progress}
}

// folderOf is the first part of a file's name.
func folderOf(name string) string {
	folder, _, _ := strings.Cut(name, "/")
	return folder
}

// problem notes what couldn't be read.
func (a *archive) problem(name string, err error) {
	if err != nil {
		a.problems = append(a.problems, name+": "+sysdump.Scrub(plan.Message(err.Error())))
	}
}

// first is the first problem.
func (a *archive) first() string {
	if len(a.problems) == 0 {
		return "there is nothing"
	}
	return a.problems[0]
}

// text writes a file that is there.
func (a *archive) text(name, content string) error {
	return a.file(name, int64(len(content)), strings.NewReader(content))
}

// file writes a file. What was written up to here can be read, also if the program is killed.
func (a *archive) file(name string, size int64, content io.Reader) error {
	h := &tar.Header{Name: path.Join(root, name), Mode: 0o644, Size: size, ModTime: a.at, Format: tar.FormatPAX}
	err := a.tar.WriteHeader(h)
	if err == nil {
		_, err = io.Copy(a.tar, content)
	}
	if err == nil {
		err = errors.Join(a.tar.Flush(), a.zip.Flush())
	}
	if err != nil {
		return fmt.Errorf("write %s into the archive: %w", name, err)
	}
	a.index = append(a.index, fmt.Sprintf("%10d %s", size, name))
	return nil
}

// spooled is the content of a file, in a file without a name.
type spooled struct {
	*os.File
	size int64
	err  error
}

// add reads files, several at once, and writes them. What can't be read is a problem, and what can't be written an error.
func (a *archive) add(ctx context.Context, entries []entry) error {
	ctx, cancel := context.WithCancel(ctx)
	var work sync.WaitGroup
	defer work.Wait()
	defer cancel()
	turns, contents := make(chan struct{}, readers), make([]chan spooled, len(entries))
	for i := range contents {
		contents[i] = make(chan spooled, 1)
	}
	work.Go(func() {
		for i, e := range entries {
			turns <- struct{}{} // those that were begun end, and are written, in this order
			work.Go(func() { contents[i] <- spool(ctx, e) })
		}
	})
	var failed error
	unread := 0
	for i, e := range entries {
		a.progress(i+1, len(entries), e.name)
		c := <-contents[i]
		<-turns
		if ctx.Err() != nil && c.size == 0 {
			unread++
		} else {
			a.problem(e.name, c.err)
		}
		if c.File == nil {
			continue
		}
		if failed == nil && c.size > 0 {
			if failed = a.file(e.name, c.size, c.File); failed != nil {
				cancel()
			} else if c.err == nil {
				a.files++
			}
		}
		failed = errors.Join(failed, c.Close())
	}
	if unread > 0 && failed == nil {
		a.problem("time", fmt.Errorf("%d files weren't read: %w", unread, context.Cause(ctx)))
	}
	return failed
}

// spool reads the content of a file.
func spool(ctx context.Context, e entry) spooled {
	if ctx.Err() != nil {
		return spooled{err: ctx.Err()}
	}
	f, err := os.CreateTemp("", "coilctl-sysdump-*")
	if err != nil {
		return spooled{err: err}
	}
	if err := os.Remove(f.Name()); err != nil {
		return spooled{err: errors.Join(err, f.Close())}
	}
	ctx, cancel := context.WithTimeout(ctx, readWithin)
	defer cancel()
	to := &cut{to: f, left: e.limit}
	err = e.read(ctx, to)
	if to.left < 0 {
		err = errors.Join(err, fmt.Errorf("it was cut after %d bytes", e.limit))
	}
	size, serr := f.Seek(0, io.SeekCurrent)
	if serr == nil {
		_, serr = f.Seek(0, io.SeekStart)
	}
	return spooled{File: f, size: size, err: errors.Join(err, serr)}
}

// errFull ends a read that has more than is kept.
var errFull = errors.New("there is more")

// cut takes so many bytes, and says of more that it is full.
type cut struct {
	to   io.Writer
	left int64
}

// Write implements io.Writer.
func (c *cut) Write(p []byte) (int, error) {
	take := p[:max(0, min(int64(len(p)), c.left))]
	n, err := c.to.Write(take)
	c.left -= int64(n)
	if err == nil && len(take) < len(p) {
		c.left, err = -1, errFull
	}
	return n, err
}

// scrubbed hides tokens in the lines that are written to another.
type scrubbed struct {
	to   io.Writer
	line []byte
}

// Write implements io.Writer.
func (s *scrubbed) Write(p []byte) (int, error) {
	s.line = append(s.line, p...)
	end := bytes.LastIndexByte(s.line, '\n') + 1
	if end == 0 && len(s.line) > lineLimit {
		end = len(s.line)
	}
	if end == 0 {
		return len(p), nil
	}
	_, err := io.WriteString(s.to, sysdump.Scrub(string(s.line[:end])))
	s.line = append(s.line[:0], s.line[end:]...)
	return len(p), err
}

// flush writes the end of a text without a newline.
func (s *scrubbed) flush() error {
	_, err := io.WriteString(s.to, sysdump.Scrub(string(s.line)))
	return err
}

// copyScrubbed copies a text without what looks like a token.
func copyScrubbed(w io.Writer, text io.Reader) error {
	s := &scrubbed{to: w}
	_, err := io.Copy(s, text)
	return notFull(errors.Join(err, s.flush()))
}

// notFull leaves out that a file is full, which is told once.
func notFull(err error) error {
	if errors.Is(err, errFull) {
		return nil
	}
	return err
}

// close writes what was written, and what wasn't, and ends the archive.
func (a *archive) close() error {
	slices.Sort(a.problems)
	problems := "Everything was read.\n"
	if len(a.problems) > 0 {
		problems = strings.Join(a.problems, "\n") + "\n"
	}
	if err := a.text("errors.txt", problems); err != nil {
		return err
	}
	return errors.Join(a.text("index.txt", strings.Join(a.index, "\n")+"\n"), a.tar.Close(), a.zip.Close())
}
