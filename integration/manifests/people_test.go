package manifests

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	rbacv1 "k8s.io/api/rbac/v1"
)

// checkPeople looks at what is added to Kubernetes' roles view, edit and admin.
func checkPeople(t *testing.T, s set, v variant) {
	const prefix = "rbac.authorization.k8s.io/aggregate-to-"
	got := map[string][]string{}
	for _, r := range s.clusterRole {
		for _, to := range []string{"view", "edit", "admin"} {
			if r.Labels[prefix+to] != "true" {
				continue
			}
			for _, rule := range r.Rules {
				got[to] = append(got[to], resourcesAndVerbs(rule)...)
			}
		}
	}
	want := map[string][]string{}
	read, change := "[get list watch]", "[create update patch delete]"
	if v.egress {
		want["view"] = append(want["view"], "egresses "+read, "egresses/status "+read, "egresses/scale "+read)
		for _, r := range []string{"egresspolicies", "egressclusterpolicies"} {
			want["view"] = append(want["view"], r+" "+read, r+"/status "+read)
		}
		for _, to := range []string{"edit", "admin"} {
			want[to] = []string{"egresses " + change, "egresspolicies " + change, "egresses/scale [update patch]"}
		}
	}
	if v.addresses() {
		for _, r := range []string{"addresspools", "addressblocks", "addressclaims", "blockrequests", "loadbalancergateways"} {
			want["view"] = append(want["view"], r+" "+read, r+"/status "+read)
		}
	}
	for _, all := range []map[string][]string{got, want} {
		for _, list := range all {
			slices.Sort(list)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("what Kubernetes' roles get (-want +got):\n%s", diff)
	}
}

func resourcesAndVerbs(r rbacv1.PolicyRule) (out []string) {
	for _, res := range r.Resources {
		out = append(out, fmt.Sprint(res, " ", r.Verbs))
	}
	return out
}
