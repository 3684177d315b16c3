// Package attachment names a pod's attachment to the network as the runtime does.
//
// It owns the identity of an attachment. It must not know what an attachment is made
// of, nor where it is recorded.
package attachment

// ID identifies an attachment: a runtime doesn't add the same pair of CNI_CONTAINERID and
// CNI_IFNAME twice without a DEL between (CNI specification, "CNI operations", "ADD"). The name of
// a pod isn't part of it, since another pod may have that name next.
type ID struct {
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifName"`
}

// Key is the container ID and the name of the interface, for people and for hashes: names
// of links are made of it. ID has no method String: each struct that embeds an ID would
// have it, too, and print nothing else.
func (id ID) Key() string { return id.ContainerID + "/" + id.IfName }
