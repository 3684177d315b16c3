// Package sysdump says what may be in an archive for a bug report: which parts of objects and texts, and which nodes if there are too many.
//
// It owns what is secret. It must not know where objects come from, nor how an archive is written.
package sysdump

import (
	"regexp"
	"slices"
	"strings"

	"github.com/coil-net/coil/pkg/plan/health"
)

// Removed is written in place of a value that isn't shown.
const Removed = "REMOVED"

// Whole says which objects are kept but for what may be secret. Of others only what Coil has to do with is kept.
func Whole(labels map[string]string) bool { return labels["app.kubernetes.io/name"] == "coil" }

// Clean takes off an object what may be secret, and what nobody needs. It changes the object.
func Clean(o map[string]any) {
	if m, ok := o["metadata"].(map[string]any); ok {
		delete(m, "managedFields")
		cleanAnnotations(m)
	}
	clean(o)
}

// ownDomains are those of annotations that are kept.
var ownDomains = []string{"coil.cybozu.com", "kubernetes.io", "k8s.io"}

// lastApplied has a whole object as it was applied, with all that is removed elsewhere.
const lastApplied = "kubectl.kubernetes.io/last-applied-configuration"

// cleanAnnotations keeps those of Coil and of Kubernetes. What others write may be anything.
func cleanAnnotations(meta map[string]any) {
	all, ok := meta["annotations"].(map[string]any)
	if !ok {
		return
	}
	for key := range all {
		domain, _, _ := strings.Cut(key, "/")
		own := slices.ContainsFunc(ownDomains, func(d string) bool { return domain == d || strings.HasSuffix(domain, "."+d) })
		if !own || key == lastApplied {
			delete(all, key)
		}
	}
}

// clean removes values of variables and headers from lists of these names, wherever they are, and annotations of templates.
func clean(v any) {
	switch v := v.(type) {
	case map[string]any:
		for key, child := range v {
			switch key {
			case "env", "httpHeaders":
				hideValues(child)
			case "metadata":
				if m, ok := child.(map[string]any); ok {
					cleanAnnotations(m)
				}
			default:
				if text, ok := child.(string); ok {
					v[key] = Scrub(text)
				}
			}
			clean(child)
		}
	case []any:
		secret := false // is the value of the flag before
		for i, child := range v {
			text, ok := child.(string)
			switch {
			case ok && secret && !strings.HasPrefix(text, "-"):
				v[i] = Removed
			case ok:
				v[i] = Scrub(text)
			}
			secret = ok && secretFlag.MatchString(text)
			clean(child)
		}
	}
}

// hideValues hides those of a list of names and values. Where a value is taken from is no secret.
func hideValues(list any) {
	all, _ := list.([]any)
	for _, e := range all {
		if m, ok := e.(map[string]any); ok && m["value"] != nil {
			m["value"] = Removed
		}
	}
}

// Trim takes off a pod that isn't Coil's all but where it is, its addresses and how it is: commands, volumes and the like are nobody's business. The object is clean.
func Trim(pod map[string]any) map[string]any {
	kept := keep(pod, "apiVersion", "kind", "metadata")
	spec, _ := pod["spec"].(map[string]any)
	short := keep(spec, "nodeName", "hostNetwork", "priority", "readinessGates", "tolerations", "schedulingGates")
	var containers []any
	all, _ := spec["containers"].([]any)
	for _, c := range all {
		if m, ok := c.(map[string]any); ok {
			containers = append(containers, keep(m, "name", "ports"))
		}
	}
	short["containers"] = containers
	kept["spec"] = short
	status, _ := pod["status"].(map[string]any)
	kept["status"] = keep(status, "phase", "conditions", "hostIP", "hostIPs", "podIP", "podIPs", "reason", "startTime", "qosClass")
	return kept
}

func keep(from map[string]any, keys ...string) map[string]any {
	kept := map[string]any{}
	for _, k := range keys {
		if v, ok := from[k]; ok {
			kept[k] = v
		}
	}
	return kept
}

// secretFlag is an argument whose value is the next one.
var secretFlag = regexp.MustCompile(`(?i)^--?[a-z0-9._-]*(?:password|passwd|secret|token|api[-_]?key)$`)

// tokens are what looks like a bearer token or a JSON web token, a password in a URL, or a key.
var tokens = []struct {
	find *regexp.Regexp
	with string
}{
	{regexp.MustCompile(`(?i)\b(bearer\s+)[A-Za-z0-9._~+/=-]{8,}`), "${1}" + Removed},
	{regexp.MustCompile(`\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*`), Removed},
	{regexp.MustCompile(`(?i)((?:password|passwd|secret|token|api[-_]?key)["']?\s*[=:]\s*["']?)[^\s"',;&]{4,}`), "${1}" + Removed},
	{regexp.MustCompile(`(://[^/\s:@]+:)[^/\s@]+@`), "${1}" + Removed + "@"},
}

// Scrub hides what looks like a token or a password in a text.
func Scrub(text string) string {
	for _, t := range tokens {
		text = t.find.ReplaceAllString(text, t.with)
	}
	return text
}

// Nodes chooses nodes of all that there are: those that are asked for or, if none is, at most so many, first those with findings, then by name.
func Nodes(all []string, findings []health.Finding, asked []string, most int) (chosen, missing []string) {
	if len(asked) > 0 {
		for _, name := range asked {
			switch {
			case slices.Contains(chosen, name) || slices.Contains(missing, name):
			case slices.Contains(all, name):
				chosen = append(chosen, name)
			default:
				missing = append(missing, name)
			}
		}
		slices.Sort(chosen)
		return chosen, missing
	}
	wrong := map[string]bool{}
	for _, f := range findings {
		wrong[f.Name] = wrong[f.Name] || f.Kind == "Node"
	}
	chosen = slices.Clone(all)
	slices.SortFunc(chosen, func(a, b string) int {
		if wrong[a] != wrong[b] {
			return map[bool]int{true: -1, false: 1}[wrong[a]]
		}
		return strings.Compare(a, b)
	})
	chosen = chosen[:min(most, len(chosen))]
	slices.Sort(chosen)
	return chosen, nil
}
