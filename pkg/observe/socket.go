package observe

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Listen makes a unix socket, for root only. One that somebody listens at is an
// error; one that a dead process left behind is replaced.
func Listen(ctx context.Context, socket string) (net.Listener, error) {
	var d net.Dialer
	if c, err := d.DialContext(ctx, "unix", socket); err == nil {
		c.Close()
		return nil, errors.New("another process serves there")
	}
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	// Made under another name and renamed, so that it is never open to others.
	tmp := Unfinished(socket)
	if err := os.Remove(tmp); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	l, err := new(net.ListenConfig).Listen(ctx, "unix", tmp)
	if err != nil {
		return nil, err
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	if err := errors.Join(os.Chmod(tmp, 0o600), os.Rename(tmp, socket)); err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

// Unfinished is the path of a socket while Listen makes it.
func Unfinished(socket string) string {
	return filepath.Join(filepath.Dir(socket), "."+strings.TrimPrefix(filepath.Base(socket), ".")+".new")
}

// writeTime is for writing an answer that was found, and readTime for reading a question.
const (
	writeTime = time.Second
	readTime  = 10 * time.Second
)

// ServeSocket serves a handler at a unix socket, for root only, until ctx ends. An answer must be found within a time.
func ServeSocket(ctx context.Context, socket string, within time.Duration, h http.Handler) error {
	l, err := Listen(ctx, socket)
	if err == nil {
		err = serve(ctx, l, &http.Server{Handler: h, ReadTimeout: readTime, WriteTimeout: within + writeTime, MaxHeaderBytes: 16 << 10})
	}
	if err != nil {
		return fmt.Errorf("serve at %s: %w", socket, err)
	}
	return nil
}

// AskSocket sends a GET to who serves at a unix socket, and writes the answer to w as it comes. It returns how many bytes that were: an error, if more than limit.
// An answer other than OK is an error with its text. If ctx has a deadline, half of the time until then is for finding the answer, and the rest for what else may be late.
func AskSocket(ctx context.Context, socket, path string, limit int64, w io.Writer) (int64, error) {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}
	client := http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://socket"+path, nil)
	if err != nil {
		return 0, err
	}
	if end, ok := ctx.Deadline(); ok {
		req.Header.Set(withinHeader, (time.Until(end) / 2).String())
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
		return 0, cmp.Or(err, errors.New(strings.TrimSpace(string(text))))
	}
	n, err := io.Copy(w, io.LimitReader(resp.Body, limit+1))
	if err == nil && n > limit {
		err = fmt.Errorf("the answer has more than %d bytes", limit)
	}
	return n, err
}
