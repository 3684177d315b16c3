package openstack

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

const (
	clusterTag = "coil-cluster="
	addressTag = "coil-address="
)

// key is what keys of addresses look like. Neutron takes no slash in the path of a tag, and filters take no comma.
var key = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$`)

// checkKey returns what is wrong with the key of an address.
func checkKey(k string) error {
	if !key.MatchString(k) {
		err := fmt.Errorf("the key %q of an address isn't 1 to 63 letters, digits, hyphens, dots and underscores, with a letter or a digit at both ends", k)
		return &Error{Reason: Misconfigured, Message: err.Error(), err: err}
	}
	return nil
}

// marks say that an object is of an address of a cluster.
type marks struct{ cluster string }

// name is that of a port, for people. It is no mark.
func (m marks) name(key string) string { return "coil-" + m.cluster + "-" + key }

// description is the mark that an object has since it was made. Neutron takes 255 characters.
func (m marks) description(key string) string {
	return "Coil: cluster " + m.cluster + ", address " + key
}

// clusterTag is the tag of all objects of the cluster.
func (m marks) clusterTag() string { return clusterTag + m.cluster }

// tags are the mark that can be listed by, and that stays if somebody changes the description.
func (m marks) tags(key string) []string { return []string{m.clusterTag(), addressTag + key} }

// keyOf returns the key of the address that an object belongs to. It is none of the cluster's if neither the tags nor the description say so,
// or if there is any sign of another cluster.
func (m marks) keyOf(description string, tags []string) (string, bool) {
	tagCluster, tagKey, ok := parseTags(tags)
	if !ok {
		return "", false
	}
	textCluster, textKey, described := parseDescription(description)
	for _, cluster := range []string{tagCluster, textCluster} {
		if cluster != "" && cluster != m.cluster {
			return "", false
		}
	}
	switch {
	case tagCluster != "" && tagKey != "":
		return tagKey, true
	case described && (tagKey == "" || tagKey == textKey):
		return textKey, true
	}
	return "", false
}

// tagged says whether an object has both tags of its address.
func (m marks) tagged(key string, tags []string) bool {
	return !slices.ContainsFunc(m.tags(key), func(t string) bool { return !slices.Contains(tags, t) })
}

// parseDescription returns what a description says, if it is exactly one of Coil's.
func parseDescription(text string) (cluster, k string, ok bool) {
	rest, found := strings.CutPrefix(text, "Coil: cluster ")
	cluster, k, cut := strings.Cut(rest, ", address ")
	if !found || !cut || !clusterID.MatchString(cluster) || !key.MatchString(k) {
		return "", "", false
	}
	return cluster, k, true
}

// parseTags returns what tags say; empty is nothing. They may not say two things.
func parseTags(tags []string) (cluster, k string, ok bool) {
	for _, t := range tags {
		for prefix, value := range map[string]*string{clusterTag: &cluster, addressTag: &k} {
			v, found := strings.CutPrefix(t, prefix)
			if !found || v == *value {
				continue
			}
			if *value != "" {
				return "", "", false
			}
			*value = v
		}
	}
	return cluster, k, k == "" || key.MatchString(k)
}
