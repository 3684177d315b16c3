package plan

import (
	"fmt"

	"k8s.io/apimachinery/pkg/util/validation"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// PoolOf returns the name of the AddressPool of a Namespace with some annotations. The error says that no pool can have the name.
func PoolOf(namespace string, annotations map[string]string) (string, error) {
	pool := annotations[v2.AnnotationPool]
	if pool == "" {
		return v2.DefaultPool, nil
	}
	// The text is a user's, of up to 256 KiB: none of it is repeated.
	if len(pool) > validation.LabelValueMaxLength || len(validation.IsDNS1123Subdomain(pool)) > 0 {
		return "", fmt.Errorf("annotation %s of Namespace %s can't be the name of an AddressPool: that has at most %d lower case letters, digits, '-' and '.'",
			v2.AnnotationPool, namespace, validation.LabelValueMaxLength)
	}
	return pool, nil
}
