package guide

import (
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
)

// Rights returns the rules of a ClusterRole that gives the rights which the help of a command names. The test ends if it names a right in other words than those known here.
func Rights(t testing.TB, help string) (rules []rbacv1.PolicyRule) {
	t.Helper()
	_, text, ok := strings.Cut(help, "\nRights: ")
	if !ok {
		t.Fatalf("the help names no rights:\n%s", help)
	}
	text, _, _ = strings.Cut(text, "\n")
	text, _, _ = strings.Cut(text, ". ")
	for clause := range strings.SplitSeq(strings.TrimSuffix(text, "."), "; ") {
		verb, what, _ := strings.Cut(clause, " ")
		switch {
		case clause == "watch these, too", clause == "with --watch, watch them, too":
			for i := range rules {
				rules[i].Verbs = append(rules[i].Verbs, "watch")
			}
		case verb == "list", verb == "get":
			what, _, _ = strings.Cut(what, " in the namespace ")
			resources, group, _ := strings.Cut(what, " of ")
			rules = append(rules, rbacv1.PolicyRule{APIGroups: []string{group}, Resources: strings.Split(resources, ", "), Verbs: []string{verb}})
		default:
			t.Fatalf("the help names the right %q, which isn't understood:\n%s", clause, help)
		}
	}
	return rules
}
