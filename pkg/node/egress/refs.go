package egress

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/coil-net/coil/pkg/plan"
)

const (
	// mostNamed is how many things of a kind an Event names, and mostSaid how many bytes
	// it has: the API server refuses more than 1024.
	mostNamed = 3
	mostSaid  = 1000
	// mostShown is how many bytes of a name that no object can have are shown.
	mostShown = 64
)

// usable returns those of the Egresses that a pod's annotations name that it may use, and says why not the
// others. Names that no Egress can have are as if it didn't exist.
func usable(refs []types.NamespacedName) (use []types.NamespacedName, problems []problem) {
	if len(refs) > plan.MostEgresses {
		text := fmt.Sprintf("the annotations name more than %d Egresses: only the first ones are used, by namespace and in the order of the annotation", plan.MostEgresses)
		problems = append(problems, problem{EgressTooMany, text, true})
		refs = refs[:plan.MostEgresses]
	}
	for _, ref := range refs {
		if len(validation.IsDNS1123Label(ref.Namespace))+len(validation.IsDNS1123Subdomain(ref.Name)) > 0 {
			problems = append(problems, problem{EgressMissing, fmt.Sprintf("Egress %s can't exist: that is no name of an object", shown(ref.String())), true})
			continue
		}
		use = append(use, ref)
	}
	return use, problems
}

// shown is what of a name is shown.
func shown(name string) string {
	if len(name) <= mostShown {
		return name
	}
	return strings.ToValidUTF8(name[:mostShown], "") + "..."
}

// few names the first of some things, and counts the others.
func few(all []string, separator string) string {
	text := strings.Join(all[:min(mostNamed, len(all))], separator)
	if len(text) > mostSaid {
		text = strings.ToValidUTF8(text[:mostSaid], "")
	}
	if n := len(all) - mostNamed; n > 0 {
		text += fmt.Sprintf("%sand %d more", separator, n)
	}
	return text
}

// summed makes one problem of each reason.
func summed(problems []problem) (all []problem) {
	texts := map[string][]string{}
	for _, p := range problems {
		if texts[p.reason] == nil {
			all = append(all, problem{reason: p.reason})
		}
		texts[p.reason] = append(texts[p.reason], p.text)
	}
	for i, p := range all {
		all[i].text = few(texts[p.reason], "; ")
	}
	return all
}
