//go:build !amd64

package vm

// cycles is 0: the host has no time-stamp counter that an emulated machine could show.
func cycles() uint64 { return 0 }
