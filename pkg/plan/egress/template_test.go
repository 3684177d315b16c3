package egress

import (
	"errors"
	"strings"
	"testing"
)

// FoU belongs to who has rights in the node's own user namespace.
func TestUserNamespacesOfRouters(t *testing.T) {
	for template, words := range map[string]string{
		"{hostUsers: false}": "template.spec.hostUsers",
		"{hostUsers: true}":  "",
		"{}":                 "",
	} {
		_, err := RouterDeployment(testEgress(template), testImage)
		var invalid *TemplateError
		if words == "" && err != nil || words != "" && (!errors.As(err, &invalid) || !strings.Contains(err.Error(), words)) {
			t.Errorf("%s: error %v, want %q", template, err, words)
		}
	}
}
