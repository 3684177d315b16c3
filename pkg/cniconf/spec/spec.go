// Package spec has the texts of the CNI specification for the plugin coil and coild: errors,
// versions, the plugin's network configuration, and results.
//
// It owns these texts. The CNI project's library makes the start of a process 0.2 ms longer
// than encoding/json alone, so the plugin, which lives for one call, doesn't link it. Tests
// hold this package to that library. It must not know how coild is called or where a
// configuration is kept.
package spec

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// Codes of errors; see "Error" of
// https://github.com/containernetworking/cni/blob/main/SPEC.md.
const (
	CodeIncompatibleVersion uint = 1
	CodeInvalidEnvironment  uint = 4
	CodeIOFailure           uint = 5
	CodeDecodingFailure     uint = 6
	CodeInvalidConfig       uint = 7
	CodeInvalidNetns        uint = 8
	CodeTryAgainLater       uint = 11
	CodeNotAvailable        uint = 50
	CodeInternal            uint = 999
)

// Error is an error in CNI's words.
type Error struct {
	Code uint `json:"code"`
	// Msg is for people; Details have more for them, or are empty.
	Msg     string `json:"msg"`
	Details string `json:"details,omitempty"`
}

// NewError returns an error.
func NewError(code uint, msg, details string) *Error { return &Error{code, msg, details} }

// Error is the message with its details.
func (e *Error) Error() string {
	if e.Details == "" {
		return e.Msg
	}
	return e.Msg + "; " + e.Details
}

// JSON is the error as the plugin writes it to standard output.
func (e *Error) JSON() []byte {
	b, _ := json.MarshalIndent(e, "", "    ") // texts and numbers can always be encoded
	return b
}

// Newest is the newest version of the specification that the plugin speaks.
const Newest = "1.1.0"

// Versions are the versions of the specification that the plugin speaks, oldest first.
func Versions() []string { return []string{"0.3.1", "0.4.0", "1.0.0", Newest} }

// VersionJSON is the answer to VERSION.
func VersionJSON() []byte {
	return append(encode(struct {
		CNIVersion        string   `json:"cniVersion"`
		SupportedVersions []string `json:"supportedVersions"`
	}{Newest, Versions()}), '\n')
}

// CheckVersion is an error of code 1 unless the plugin speaks the version of a
// configuration; one that says none has 0.1.0.
func CheckVersion(version string) error {
	version = cmp.Or(version, "0.1.0")
	if slices.Contains(Versions(), version) {
		return nil
	}
	return NewError(CodeIncompatibleVersion, "incompatible CNI versions", fmt.Sprintf("config is %q, plugin supports %q", version, Versions()))
}

// Since says whether a version that CheckVersion accepts is another one or a later one.
func Since(version, first string) bool {
	return slices.Index(Versions(), version) >= slices.Index(Versions(), first)
}

// ValidName says whether a string can be a container ID or the name of a network.
func ValidName(s string) bool {
	const first = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
	return s != "" && strings.IndexByte(first, s[0]) >= 0 && strings.Trim(s, first+"_.-") == ""
}
