//go:build !faultpoints

package faultpoint

// At marks a point.
func At(Point) {}

// Held says that repairs wait.
func Held() bool { return false }
