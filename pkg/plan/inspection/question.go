package inspection

import (
	"fmt"
	"strings"
)

// PodPath is the path of a question about a pod, NAMESPACE/NAME, that begins with before.
func PodPath(before, pod string) (string, error) {
	namespace, name, ok := strings.Cut(pod, "/")
	if !ok || namespace == "" || name == "" || strings.Contains(name, "/") || strings.ContainsAny(pod, "?#%") {
		return "", fmt.Errorf("%q isn't NAMESPACE/NAME of a pod", pod)
	}
	return before + pod, nil
}
