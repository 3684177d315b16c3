package podnet

import (
	"crypto/sha1"
	"crypto/sha256"
	"encoding/hex"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/dataplane"
)

// Limits of the kernel, in bytes.
const (
	maxIfName  = unix.IFNAMSIZ - 1
	maxAlias   = 255 // IFALIASZ - 1
	maxAltName = 127 // ALTIFNAMSIZ - 1
)

// Prefixes of names. Programs that manage links by themselves leave "veth*" alone.
const (
	namePrefix    = "veth"
	altNamePrefix = "coil-"
	// hashDigits is how much of a hash a name has room for after the prefix.
	hashDigits = maxIfName - len(namePrefix)
)

// linkName is the name of the host's end while it is made, and for good unless it is
// named for Calico. It doesn't depend on the pod's name, which the next sandbox
// of the pod has, too.
func linkName(id attachment.ID) string {
	sum := sha256.Sum256([]byte(id.Key()))
	return namePrefix + hex.EncodeToString(sum[:])[:hashDigits]
}

// altName is the alternative name by which the host's end is found.
func altName(id attachment.ID) string {
	name := altNamePrefix + id.ContainerID + "-" + id.IfName
	if len(name) <= maxAltName {
		return name
	}
	sum := sha256.Sum256([]byte(id.ContainerID))
	return altNamePrefix + hex.EncodeToString(sum[:]) + "-" + id.IfName
}

// isAltName says whether a name may be one of those that altName gives.
func isAltName(s string) bool { return strings.HasPrefix(s, altNamePrefix) }

// calicoName is the name that Calico gives to the host's end of a pod's link.
func calicoName(namespace, name string) string {
	sum := sha1.Sum([]byte(namespace + "." + name))
	return namePrefix + hex.EncodeToString(sum[:])[:hashDigits]
}

// alias says whose link it is: COIL:<pool>:<container ID>:<interface name>.
func (p Pod) alias() string {
	return dataplane.AliasPrefix + p.Pool + ":" + p.ContainerID + ":" + p.IfName
}

// parseAlias is the reverse of alias; ok is false for links that aren't Coil's.
// The pool is empty for pods that Coil didn't give their address.
func parseAlias(alias string) (pool string, id attachment.ID, ok bool) {
	rest, ok := strings.CutPrefix(alias, dataplane.AliasPrefix)
	if !ok {
		return "", attachment.ID{}, false
	}
	parts := strings.Split(rest, ":")
	if len(parts) != 3 || parts[1] == "" || parts[2] == "" {
		return "", attachment.ID{}, false
	}
	return parts[0], attachment.ID{ContainerID: parts[1], IfName: parts[2]}, true
}

// validIfName says whether the kernel accepts a name of a link.
func validIfName(s string) bool {
	return s != "" && s != "." && s != ".." && len(s) <= maxIfName && !strings.ContainsAny(s, "/: \t\n\v\f\r")
}
