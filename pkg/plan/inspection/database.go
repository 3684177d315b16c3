package inspection

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Limits of what coild tells of its record.
const (
	// DatabaseLimit is the most bytes of a Database as JSON: tens of thousands of addresses.
	DatabaseLimit = 8 << 20
	// CopyLimit is the most bytes of a copy of coild.db.
	CopyLimit = 64 << 20
)

// Database is what is written in a node's record of addresses, coild.db, at one moment. Values are texts as they are in the file, sensible or not.
type Database struct {
	Node Node `json:"node"`
	// Schema is the version of the file's schema, and Newest the newest one that coild knows.
	Schema int `json:"schema"`
	Newest int `json:"newest"`
	// Meta says what the file is about, such as "node_uid".
	Meta map[string]string `json:"meta"`
	// Damage is what SQLite finds wrong with the file; empty if nothing.
	Damage []string `json:"damage"`
	// Blocks are sorted by name, and Addresses by their row.
	Blocks    []DatabaseBlock   `json:"blocks"`
	Addresses []DatabaseAddress `json:"addresses"`
	// Truncated says what was left out, and why.
	Truncated string `json:"truncated,omitempty"`
}

// DatabaseBlock is a row of the table blocks.
type DatabaseBlock struct {
	ID    int64  `json:"id"`
	Name  string `json:"name"`
	Pool  string `json:"pool"`
	IPv4  string `json:"ipv4,omitempty"`
	IPv6  string `json:"ipv6,omitempty"`
	Since string `json:"since"`
}

// DatabaseAddress is a row of the table addresses. An address of a block without a row was never used.
type DatabaseAddress struct {
	ID   int64  `json:"id"`
	IPv4 string `json:"ipv4,omitempty"`
	IPv6 string `json:"ipv6,omitempty"`
	// State is such as "attached"; see package store. A row stays "cooling" when the address is free again.
	State string `json:"state"`
	Since string `json:"since"`
	// Pool and Block are names. BlockID is the row of the block, and Offset the place in it; 0 and -1 if the record lacks the block.
	Pool        string `json:"pool"`
	Block       string `json:"block"`
	BlockID     int64  `json:"blockID,omitempty"`
	Offset      int    `json:"offset"`
	Namespace   string `json:"namespace"`
	Pod         string `json:"pod"`
	PodUID      string `json:"podUID,omitempty"`
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifName"`
	Netns       string `json:"netns,omitempty"`
	HostLink    string `json:"hostLink,omitempty"`
}

// TimeFormat is how a Database has times, in UTC.
const TimeFormat = "2006-01-02T15:04:05.000Z"

// Texts are the addresses of a row.
func (a DatabaseAddress) Texts() (all []string) {
	for _, x := range []string{a.IPv4, a.IPv6} {
		if x != "" {
			all = append(all, x)
		}
	}
	return all
}

// Entered is when the row got its state; false if that can't be read.
func (a DatabaseAddress) Entered() (time.Time, bool) {
	t, err := time.Parse(TimeFormat, a.Since)
	return t, err == nil
}

// Write returns the database as one line of JSON of at most limit bytes. Of a longer one rows of addresses that nobody has are left out, and Truncated says so.
func (d Database) Write(limit int, free func(state string) bool) ([]byte, error) {
	all := len(d.Addresses)
	return write(&d, limit, func() bool {
		if d.Truncated != "" {
			return false
		}
		d.Addresses = slices.DeleteFunc(slices.Clone(d.Addresses), func(a DatabaseAddress) bool { return free(a.State) })
		d.Truncated = fmt.Sprintf("the answer is limited to %d bytes: %d of %d addresses are left out, which nobody has", limit, all-len(d.Addresses), all)
		return true
	})
}

// ParseDatabase reads a database.
func ParseDatabase(text []byte) (*Database, error) {
	return read[Database](text, "the record that coild tells")
}

// Sum tells who receives a file whether it is whole: "coild debug db" writes it on the standard error, as a line among others.
type Sum struct {
	Bytes  int64  `json:"bytes"`
	SHA256 string `json:"sha256"`
}

// sumBegins is how the line of a Sum begins.
const sumBegins = `{"bytes":`

// String is the line.
func (s Sum) String() string { return fmt.Sprintf(sumBegins+`%d,"sha256":%q}`, s.Bytes, s.SHA256) }

// FindSum reads the last Sum among lines.
func FindSum(lines string) (Sum, error) {
	i := strings.LastIndex("\n"+lines, "\n"+sumBegins)
	if i < 0 {
		return Sum{}, errors.New("coild hasn't told the sum of the file: it may have ended before")
	}
	line, _, _ := strings.Cut(lines[i:], "\n")
	var s Sum
	if err := json.Unmarshal([]byte(line), &s); err != nil {
		return Sum{}, fmt.Errorf("understand the sum that coild tells: %w", err)
	}
	return s, nil
}
