package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
)

// Families of the pods.
const (
	ipv4 = "ipv4"
	dual = "dual"
)

// pod is an attachment of a namespace to the node of one system.
type pod struct {
	sandbox
	id     string // CNI_CONTAINERID
	number int
	family string
	result []byte // of ADD
	index  int    // of the host's end, of the kernel's floor
}

const ifName = "eth0"

// sandbox is a pod's network namespace.
type sandbox interface {
	Path() string
	// has says whether it has a link of a name.
	has(link string) (bool, error)
}

// newPod is the pod of a number; used tells the sandboxes of a namespace apart.
func newPod(s sandbox, number, used int, family string) *pod {
	sum := sha256.Sum256(fmt.Appendf(nil, "%d/%d/%s", number, used, family))
	return &pod{sandbox: s, id: hex.EncodeToString(sum[:]), number: number, family: family}
}

// system attaches pods to a node of its own. The methods of one worker are called
// from one thread, which is in the node's network namespace.
type system interface {
	name() string
	// node is the namespace of the node.
	node() *space
	add(ctx context.Context, p *pod) error
	// check is only called if checks says so.
	check(ctx context.Context, p *pod) error
	checks() bool
	del(ctx context.Context, p *pod) error
	// wires says whether ADD makes anything in the pod, so that DEL is awaited.
	wires() bool
	close() error
}
