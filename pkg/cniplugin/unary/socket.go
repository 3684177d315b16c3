package unary

import (
	"errors"
	"io"
	"os"
	"syscall"
	"time"
)

// socket is a connected unix socket. Calls on it block the thread: the process has
// nothing else to do, and package net would first start a poller.
type socket struct {
	fd       int
	deadline time.Time
}

// dial connects within a timeout, also while the server's backlog is full.
func dial(path string, timeout time.Duration) (socket, error) {
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return socket{}, err
	}
	s := socket{fd: fd}
	err = s.limit(syscall.SO_SNDTIMEO, timeout)
	if err == nil {
		// A connect that a signal interrupted hasn't begun (unix(7) has no state between).
		err = retry(func() error { return syscall.Connect(fd, &syscall.SockaddrUnix{Name: path}) })
	}
	if err != nil {
		s.close()
		return socket{}, err
	}
	return s, nil
}

func (s socket) close() { _ = syscall.Close(s.fd) } // nothing is left to be written

// limit bounds calls that block; 0 would be no limit.
func (s socket) limit(option int, d time.Duration) error {
	tv := syscall.NsecToTimeval(max(d, time.Microsecond).Nanoseconds())
	return syscall.SetsockoptTimeval(s.fd, syscall.SOL_SOCKET, option, &tv)
}

// block does a call that blocks until the deadline at most; os.ErrDeadlineExceeded.
func (s socket) block(option int, call func() (int, error)) (n int, err error) {
	left := time.Until(s.deadline)
	if left <= 0 {
		return 0, os.ErrDeadlineExceeded
	}
	if err := s.limit(option, left); err != nil {
		return 0, err
	}
	err = retry(func() error {
		n, err = call()
		return err
	})
	if errors.Is(err, syscall.EAGAIN) {
		err = os.ErrDeadlineExceeded
	}
	return max(n, 0), err
}

// Read implements io.Reader.
func (s socket) Read(b []byte) (int, error) {
	n, err := s.block(syscall.SO_RCVTIMEO, func() (int, error) { return syscall.Read(s.fd, b) })
	if n == 0 && err == nil && len(b) > 0 {
		err = io.EOF
	}
	return n, err
}

// Write implements io.Writer.
func (s socket) Write(b []byte) (int, error) {
	done := 0
	for done < len(b) {
		n, err := s.block(syscall.SO_SNDTIMEO, func() (int, error) { return syscall.Write(s.fd, b[done:]) })
		done += n
		if err != nil {
			return done, err
		}
	}
	return done, nil
}

// retry repeats a system call that a signal interrupted.
func retry(call func() error) error {
	for {
		if err := call(); !errors.Is(err, syscall.EINTR) {
			return err
		}
	}
}
