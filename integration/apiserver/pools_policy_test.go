package apiserver

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/generated/clientset/versioned"
	"github.com/coil-net/coil/integration/lab/controlplane"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// TestPoolsOverlap tries pools with addresses of others: those of pools and of Services are refused, unless they are excluded, or the other pool drains.
func TestPoolsOverlap(t *testing.T) {
	api := own(t, controlplane.Options{})
	pools := testkit.Must(versioned.NewForConfig(api.RESTConfig()))(t).CoilV2().AddressPools()
	if err := installCRDs(t.Context(), api.RESTConfig(), readCRDs); err != nil {
		t.Fatal(err)
	}
	pool := func(name string, exclude []string, subnets ...v2.SubnetSet) *v2.AddressPool {
		return &v2.AddressPool{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v2.AddressPoolSpec{Exclude: exclude, Subnets: subnets}}
	}
	// Two that overlap are there before the policies, as of Coil 2.x.
	for _, p := range []*v2.AddressPool{
		pool("old", nil, v4("10.0.0.0/16")), pool("older", nil, v4("10.0.128.0/17")), pool("dual", nil, dual("10.1.0.0/16", "fd00:1::/112")),
		pool("holes", []string{"10.2.0.0/24", "10.2.1.0-10.2.1.255"}, v4("10.2.0.0/16")), pool("drains", nil, v4("10.3.0.0/16")), pool("small", nil, v4("10.5.5.0/24")),
	} {
		p.Spec.Drain = p.Name == "drains"
		testkit.Must(pools.Create(t.Context(), p, metav1.CreateOptions{}))(t)
	}
	testkit.Check(t, installRBAC(t.Context(), api.RESTConfig(), "../ipam/addresspools.yaml"))

	try := func(p *v2.AddressPool) error {
		_, err := pools.Create(t.Context(), p, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return err
	}
	services := controlplane.DefaultServiceCIDRs()[0].String()
	testkit.Eventually(t, 60*time.Second, "the policies are in force", func() error {
		if !apierrors.IsInvalid(try(pool("new", nil, v4("10.0.0.0/24")))) || !apierrors.IsInvalid(try(pool("new", nil, v4(services)))) {
			return errors.New("overlapping pools are accepted")
		}
		return nil
	})
	const todo = "choose others, list those that it has as CIDRs in spec.exclude, or let that pool drain first (spec.drain)"
	for _, tc := range []struct {
		name  string
		pool  *v2.AddressPool
		wants string // empty: it is accepted
	}{
		{"a part of another pool", pool("new", nil, v4("10.9.0.0/16"), v4("10.1.2.0/24")), "AddressPool dual has 10.1.0.0/16, and so the same addresses: " + todo},
		{"around another pool", pool("new", nil, v4("10.4.0.0/14")), "AddressPool small has 10.5.5.0/24, and so"},
		{"the same in one family", pool("new", nil, dual("10.9.0.0/16", "fd00:1::/112")), "AddressPool dual has fd00:1::/112, and so"},
		{"its own addresses", pool("new", nil, dual("10.9.0.0/16", "fd00:9::/112")), ""},
		{"what it excludes", pool("new", []string{"10.5.5.0/24"}, v4("10.5.0.0/16")), ""},
		{"what it excludes in part", pool("new", []string{"10.5.5.0/25"}, v4("10.5.0.0/16")), "AddressPool small has 10.5.5.0/24, and so"},
		{"what the other one excludes", pool("new", nil, v4("10.2.0.0/24")), ""},
		{"beside what the other one excludes", pool("new", nil, v4("10.2.0.0/23")), "AddressPool holes has 10.2.0.0/16, and so"},
		{"of a pool that drains", pool("new", nil, v4("10.3.0.0/17")), ""},
		{"of Services", pool("new", nil, v4(services)), "Services get addresses of " + services + " (ServiceCIDR kubernetes), and so the same ones: choose others, or list those that they have as CIDRs in spec.exclude"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := try(tc.pool)
			if tc.wants == "" && err != nil || tc.wants != "" && (!apierrors.IsInvalid(err) || !strings.Contains(err.Error(), tc.wants)) {
				t.Errorf("the error is %v, want %q", err, tc.wants)
			}
		})
	}

	// Those that overlap already can be changed, and get subnets of their own.
	patch := func(name, spec string) error {
		_, err := pools.Patch(t.Context(), name, types.MergePatchType, []byte(spec), metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}})
		return err
	}
	for spec, wants := range map[string]string{
		`{"metadata":{"finalizers":["coil.cybozu.com"]}}`:                             "",
		`{"spec":{"announce":"Neighbor"}}`:                                            "",
		`{"spec":{"subnets":[{"ipv4":"10.0.128.0/17"},{"ipv4":"10.7.0.0/16"}]}}`:      "",
		`{"spec":{"subnets":[{"ipv4":"10.0.128.0/17"},{"ipv4":"10.5.5.0/27"}]}}`:      "AddressPool small has 10.5.5.0/24, and so",
		`{"spec":{"subnets":[{"ipv4":"10.0.128.0/17"},{"ipv4":"` + services + `"}]}}`: "Services get addresses of ",
	} {
		if err := patch("older", spec); wants == "" && err != nil || wants != "" && (!apierrors.IsInvalid(err) || !strings.Contains(err.Error(), wants)) {
			t.Errorf("%s: the error is %v, want %q", spec, err, wants)
		}
	}

	// As many subnets as there may be, of several pools, are compared in time.
	var many []v2.SubnetSet
	for i := range 64 {
		many = append(many, dual(fmt.Sprintf("10.100.%d.0/24", i), fmt.Sprintf("fd00:100:%x::/120", i)))
	}
	testkit.Must(pools.Create(t.Context(), pool("many", nil, many...), metav1.CreateOptions{}))(t)
	for i := range many {
		many[i] = dual(fmt.Sprintf("10.101.%d.0/24", i), fmt.Sprintf("fd00:101:%x::/120", i))
	}
	if err := try(pool("more", nil, many...)); err != nil {
		t.Errorf("the error is %v", err)
	}
	many[63] = dual("10.101.63.0/24", "fd00:100:0::/120")
	testkit.Eventually(t, 20*time.Second, "the policy knows the pool", func() error {
		if err := try(pool("more", nil, many...)); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "AddressPool many has fd00:100:0::/120, and so") {
			return fmt.Errorf("the error is %w", err)
		}
		return nil
	})
}
