package program

import (
	"cmp"
	"fmt"
	"math"
	"net/netip"
	"path/filepath"
)

// Required returns an error if an environment variable isn't set; content says what it should have.
func Required(variable, value, content string) error {
	if value == "" {
		return fmt.Errorf("environment variable %s is not set: it must be %s", variable, content)
	}
	return nil
}

// Within returns an error unless the value of a flag is within two bounds.
func Within[T cmp.Ordered](flag string, value, low, high T) error {
	if value < low || value > high {
		return fmt.Errorf("%s=%v is not within %v and %v", flag, value, low, high)
	}
	return nil
}

// Protocol returns an error unless the value of a flag is a protocol number of routes that the kernel and administrators
// leave free: the first four have meanings (rtnetlink(7)).
func Protocol(flag string, value int) error { return Within(flag, value, 5, math.MaxUint8) }

// Positive returns an error unless the value of a flag is more than zero.
func Positive[T cmp.Ordered](flag string, value T) error {
	if value <= *new(T) {
		return fmt.Errorf("%s is %v: it must be more than 0", flag, value)
	}
	return nil
}

// NotNegative returns an error if the value of a flag is less than zero.
func NotNegative[T cmp.Ordered](flag string, value T) error {
	if value < *new(T) {
		return fmt.Errorf("%s is %v: it must not be negative", flag, value)
	}
	return nil
}

// Absolute returns an error unless the value of a flag or variable is an absolute path.
func Absolute(name, path string) error {
	if !filepath.IsAbs(path) {
		return fmt.Errorf("%s=%q is not an absolute path", name, path)
	}
	return nil
}

// Prefixes parses the values of a flag.
func Prefixes(flag string, values []string) (all []netip.Prefix, err error) {
	for _, v := range values {
		p, err := netip.ParsePrefix(v)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", flag, err)
		}
		all = append(all, p.Masked())
	}
	return all, nil
}
