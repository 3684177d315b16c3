package apiserver

import (
	"encoding/json"
	"github.com/coil-net/coil/pkg/testkit"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/dynamic"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// roundTrip is an object that the API server must give back as it got it.
type roundTrip struct {
	name string
	kind kind
	obj  runtime.Object
	// maximal objects have every field but those of except.
	maximal bool
	except  []string
	// defaults are the fields that the API server adds, as YAML.
	defaults string
}

func ptr[T any](v T) *T { return &v }

func roundTrips() []roundTrip {
	now := metav1.NewTime(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC))
	conditions := []metav1.Condition{{
		Type: "Exhausted", Status: metav1.ConditionTrue, ObservedGeneration: 7,
		LastTransitionTime: now, Reason: "AllBlocksTaken", Message: "every block is taken",
	}}
	selector := metav1.LabelSelector{
		MatchLabels:      map[string]string{"team": "a"},
		MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "stage", Operator: metav1.LabelSelectorOpNotIn, Values: []string{"test"}}},
	}
	pair := v2.EgressAddress{IPv4: "198.51.100.3", IPv6: "fd00::3"}
	nat := v2.EgressReference{Namespace: "internet", Name: "nat"}
	use := v2.EgressUse{Egress: &nat, Destinations: []string{"192.0.2.0/24", "2001:db8::/32"}, Address: &pair, OnFailure: v2.EgressFailureNode}
	policyStatus := v2.EgressPolicyStatus{
		ObservedGeneration: 7, Resolved: &v2.ResolvedPolicy{ObservedGeneration: 7, Egress: &nat, Pods: []metav1.LabelSelector{selector},
			Address: &v2.ResolvedAddress{Block: "partners-3", EgressAddress: pair}},
		Node: "worker", Router: "nat-1", Since: &conditions[0].LastTransitionTime, Clients: 5, Summary: v2.PolicySummary{Egress: "internet/nat", Address: pair.String()}, Conditions: conditions,
	}
	nodes := []v2.FloatingNode{{Node: "worker", Addresses: []string{"192.0.2.1", "fd00::1"}, PodUID: "2"}}
	return []roundTrip{
		{name: "maximal", kind: poolKind, maximal: true, except: []string{"Spec.VRRP", "Spec.OpenStack"}, obj: &v2.AddressPool{
			Spec: v2.AddressPoolSpec{Purpose: v2.PurposeAny, FloatingNamespaces: []string{"internet"}, Announce: v2.AnnounceNeighbor, BlockSizeBits: 6, Subnets: []v2.SubnetSet{{IPv4: ptr("10.0.0.0/16"), IPv6: ptr("fd00::/112")}}, Exclude: []string{"10.0.0.1"}, Drain: true},
			Status: v2.AddressPoolStatus{
				ObservedGeneration: 7, LastIndex: ptr(int32(3)),
				Blocks:     v2.Usage{Used: 4, Total: 1024, Summary: "4/1024"},
				Addresses:  v2.Usage{Used: 99, Total: 65536, Summary: "99/65536"},
				Floating:   v2.FloatingUsage{Used: 5, Cooling: 2},
				Conditions: conditions,
			},
		}},
		{name: "of gateways", kind: poolKind, obj: &v2.AddressPool{
			Spec: v2.AddressPoolSpec{Purpose: v2.PurposeFloating, Announce: v2.AnnounceGateway, VRRP: &v2.PoolVRRP{RouterID: 10, Instances: 3}, Subnets: []v2.SubnetSet{{IPv6: ptr("fd00::/128")}},
				OpenStack: &v2.PoolOpenStack{Cloud: "prod", SubnetIDs: []string{"subnet"}, FloatingNetworkID: "network"}},
		}},
		{name: "maximal", kind: gatewayKind, maximal: true, obj: &v2.LoadBalancerGateway{
			Spec: v2.LoadBalancerGatewaySpec{
				Pools: []string{"dmz"}, Endpoints: v2.EndpointsPod, Masquerade: v2.MasqueradeNever, UnknownPorts: v2.UnknownPortsRefuse,
				VRRP:      &v2.GatewayVRRP{Interface: "eth0", AddressInterface: "eth1.7", Sources: []string{"192.0.2.1", "2001:db8::1"}},
				OpenStack: &v2.GatewayOpenStack{PortID: "port", AddressPairs: []string{"192.0.2.0/26", "2001:db8::/64"}},
			},
			Status: v2.LoadBalancerGatewayStatus{
				Applied: v2.GatewayState{Generation: 3, Blocks: "12345", Services: 1, Ports: 2, Endpoints: 3, Hash: "0123456789abcdef"}, LastContact: &now, Conditions: conditions,
				Errors: []v2.GatewayError{{Service: "shop/web", Message: "port 80 has no NodePort"}},
				VRRP:   []v2.GatewayVRRPState{{RouterID: 10, Family: corev1.IPv4Protocol, State: "MASTER", Priority: 200, Addresses: 7}},
			},
		}},
		{name: "minimal", kind: gatewayKind, defaults: "spec: {endpoints: NodePort, masquerade: Always, unknownPorts: Drop}", obj: &v2.LoadBalancerGateway{
			Spec: v2.LoadBalancerGatewaySpec{Pools: []string{"dmz"}},
		}},
		{name: "minimal", kind: poolKind, defaults: "spec: {announce: Route}", obj: &v2.AddressPool{
			Spec: v2.AddressPoolSpec{Subnets: []v2.SubnetSet{{IPv6: ptr("fd00::/128")}}},
		}},
		{name: "maximal", kind: blockKind, maximal: true, obj: &v2.AddressBlock{
			Index: 3, IPv4: ptr("10.0.0.3/32"), IPv6: ptr("fd00::3/128"),
			Floating: &v2.Floating{
				Owner: v2.FloatingOwner{Kind: "Egress", Namespace: "internet", Name: "nat", UID: "1", Summary: "Egress internet/nat"},
				Claim: "nat", CoolDownSeconds: 60, ReleasedAt: &now, Successors: nodes, MovingTo: "worker2",
				Holding: v2.FloatingHolding{
					Holder: "worker", PodUID: "2", Epoch: 7, Since: &now, Claims: 3, HandedOver: true, Voters: nodes, Contender: "worker2",
				},
			},
			Status: v2.AddressBlockStatus{Allocated: 30, Cooling: 2, Conditions: conditions},
		}},
		{name: "minimal", kind: blockKind, obj: &v2.AddressBlock{IPv4: ptr("10.0.0.0/27")}},
		{name: "maximal", kind: requestKind, maximal: true, obj: &v2.BlockRequest{
			Spec: v2.BlockRequestSpec{NodeName: "worker", PoolName: "default", Claim: "default-3"},
			Status: v2.BlockRequestStatus{AddressBlockName: "default-3", Conditions: []v2.BlockRequestCondition{{
				Type: v2.BlockRequestComplete, Status: corev1.ConditionTrue, Reason: "Assigned", Message: "default-3",
				LastProbeTime: now, LastTransitionTime: now,
			}}},
		}},
		{name: "minimal", kind: requestKind, obj: &v2.BlockRequest{
			Spec: v2.BlockRequestSpec{NodeName: "worker", PoolName: "default"},
			Status: v2.BlockRequestStatus{Conditions: []v2.BlockRequestCondition{{
				Type: v2.BlockRequestFailed, Status: corev1.ConditionTrue,
			}}},
		}},
		{name: "maximal", kind: claimKind, maximal: true, except: []string{"Spec.Count"}, obj: &v2.AddressClaim{
			Spec: v2.AddressClaimSpec{Pool: "partners", Addresses: []string{"10.0.0.3", "10.0.0.8-10.0.0.9", "fd00::/126"}, CoolDownSeconds: 60},
			Status: v2.AddressClaimStatus{
				ObservedGeneration: 7, Summary: "1/4", Conditions: conditions,
				Addresses: []v2.ClaimedAddress{{Block: "partners-3", IPv4: "10.0.0.3", IPv6: "fd00::3"}},
				Provided:  &v2.ProvidedAddress{PortID: "port", IPv4: "10.0.0.3", IPv6: "fd00::3", FloatingIP: "203.0.113.7"},
			},
		}},
		{name: "minimal", kind: claimKind, obj: &v2.AddressClaim{Spec: v2.AddressClaimSpec{Pool: "partners", Count: ptr(int32(0))}}},
		{name: "labels", kind: policyKind, maximal: true, except: []string{"Spec.Services", "Spec.PodCIDRs"}, obj: &v2.EgressPolicy{
			Spec: v2.EgressPolicySpec{EgressUse: use, Pods: &selector}, Status: policyStatus,
		}},
		{name: "Services", kind: policyKind, maximal: true, except: []string{"Spec.Pods", "Spec.PodCIDRs"}, obj: &v2.EgressPolicy{
			Spec: v2.EgressPolicySpec{EgressUse: use, Services: []string{"frontend"}}, Status: policyStatus,
		}},
		{name: "minimal", kind: policyKind, defaults: `spec: {onFailure: Closed}`, obj: &v2.EgressPolicy{
			Spec: v2.EgressPolicySpec{PodCIDRs: []string{"10.0.0.0/16"}},
		}},
		{name: "labels", kind: clusterPolicyKind, maximal: true, except: []string{"Spec.PodCIDRs"}, obj: &v2.EgressClusterPolicy{
			Spec: v2.EgressClusterPolicySpec{EgressUse: use, NamespaceSelector: selector, Pods: &selector}, Status: policyStatus,
		}},
		{name: "minimal", kind: clusterPolicyKind, defaults: `spec: {onFailure: Closed}`, obj: &v2.EgressClusterPolicy{
			Spec: v2.EgressClusterPolicySpec{Pods: &metav1.LabelSelector{}},
		}},
		{name: "ranges", kind: clusterPolicyKind, defaults: `spec: {onFailure: Closed}`, obj: &v2.EgressClusterPolicy{
			Spec: v2.EgressClusterPolicySpec{NamespaceSelector: selector, PodCIDRs: []string{"10.0.0.0/16", "fd00::/64"}},
		}},
		{name: "maximal", kind: egressKind, maximal: true,
			except: []string{"Spec.PodDisruptionBudget.MinAvailable", "Spec.Template.Spec.Object", "Spec.Addresses.List"},
			obj:    maximalEgress(conditions)},
		{name: "minimal", kind: egressKind, defaults: `spec: {peering: Service, sessionAffinity: ClientIP}`, obj: &v2.Egress{
			Spec: v2.EgressSpec{Destinations: []string{"0.0.0.0/0"}},
		}},
		{name: "listed addresses", kind: egressKind, defaults: `spec: {sessionAffinity: ClientIP}`, obj: &v2.Egress{
			Spec: v2.EgressSpec{Destinations: []string{"0.0.0.0/0"}, Peering: v2.EgressPeeringDirect, Addresses: &v2.EgressAddresses{
				Use: v2.EgressAddressOfClient, Pool: "partners", List: []string{"10.0.0.3", "10.0.0.8-10.0.0.9", "fd00::/126"},
			}},
		}},
		{name: "empty structures", kind: egressKind, defaults: `spec: {peering: Service, sessionAffinity: ClientIP}`, obj: &v2.Egress{
			Spec: v2.EgressSpec{
				Destinations: []string{"0.0.0.0/0"}, Replicas: 1,
				Strategy: &appsv1.DeploymentStrategy{}, Template: &v2.EgressPodTemplate{Spec: &runtime.RawExtension{Raw: []byte(`{}`)}},
				SessionAffinityConfig: &corev1.SessionAffinityConfig{}, PodDisruptionBudget: &v2.EgressPDBSpec{},
				AllowedNamespaces: &metav1.LabelSelector{},
			},
		}},
	}
}

func maximalEgress(conditions []metav1.Condition) *v2.Egress {
	return &v2.Egress{
		Spec: v2.EgressSpec{
			Destinations: []string{"192.0.2.0/24", "2001:db8::/32"},
			Default:      true,
			Replicas:     3,
			Strategy: &appsv1.DeploymentStrategy{
				Type: appsv1.RollingUpdateDeploymentStrategyType,
				RollingUpdate: &appsv1.RollingUpdateDeployment{
					MaxUnavailable: ptr(intstr.FromInt32(1)), MaxSurge: ptr(intstr.FromString("25%")),
				},
			},
			Template: &v2.EgressPodTemplate{
				Metadata: v2.Metadata{Annotations: map[string]string{"a": "1"}, Labels: map[string]string{"b": "2"}},
				Spec: &runtime.RawExtension{Raw: []byte(
					`{"containers":[{"name":"egress","resources":{"limits":{"cpu":"1","memory":"400Mi"}}}],"tolerations":[{"operator":"Exists"}]}`)},
			},
			Peering:               v2.EgressPeeringDirect,
			SessionAffinity:       corev1.ServiceAffinityClientIP,
			SessionAffinityConfig: &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: ptr(int32(60))}},
			FouSourcePortAuto:     true,
			AllowedNamespaces: &metav1.LabelSelector{
				MatchLabels:      map[string]string{"team": "a"},
				MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "stage", Operator: metav1.LabelSelectorOpNotIn, Values: []string{"test"}}},
			},
			OriginatingOnly: true,

			MaxConnectionsPerClient: ptr(int32(20000)),
			Addresses: &v2.EgressAddresses{
				Use: v2.EgressAddressOfClient, Pool: "partners", Count: ptr(int32(4)),
				Shared:     []string{"198.51.100.3"},
				Placement:  &v2.EgressPlacement{Strategy: v2.EgressPlacementPack, MaxPerNode: 3},
				Assignment: &v2.EgressAssignment{Strategy: v2.EgressAssignmentRandom, MaxPolicies: 3, WhenFull: v2.EgressWhenFullRefuse},
				Standby:    true,
			},
			PodDisruptionBudget: &v2.EgressPDBSpec{MaxUnavailable: ptr(intstr.FromString("50%"))},
		},
		Status: v2.EgressStatus{
			ObservedGeneration: 7, Replicas: 3, Selector: "app.kubernetes.io/instance=internet", Clients: 5,
			Addresses: []v2.EgressAddressStatus{{
				Block: "partners-3", EgressAddress: v2.EgressAddress{IPv4: "10.0.0.3", IPv6: "fd00::3"}, Node: "worker", Router: "nat-1", Since: &conditions[0].LastTransitionTime,
				PolicyCount: 9, Policies: []string{"EgressPolicy shop/partners"},
			}},
			NodeAddresses:  []v2.EgressNodeAddress{{Router: "nat-1", Node: "worker", EgressAddress: v2.EgressAddress{IPv4: "192.0.2.1", IPv6: "fd00::1"}}},
			InClusterCIDRs: []string{"10.0.0.0/16", "fd00::/112"}, Conditions: conditions,
		},
	}
}

// TestRoundTrip holds that the types, the schema and what the API server does
// with both agree: an object comes back as it went in, apart from defaults.
func TestRoundTrip(t *testing.T) {
	eachVersion(t, func(t *testing.T, version string) {
		dyn := testkit.Must(dynamic.NewForConfig(shared(t, version).RESTConfig()))(t)
		for _, tt := range roundTrips() {
			t.Run(tt.kind.name+"/"+tt.name, func(t *testing.T) {
				if tt.maximal {
					v := reflect.ValueOf(tt.obj).Elem()
					for _, field := range []string{"Spec", "Index", "IPv4", "IPv6", "Status"} {
						if f := v.FieldByName(field); f.IsValid() {
							noZero(t, f, field, tt.except)
						}
					}
				}
				tt.check(t, dyn)
			})
		}
	})
}

func (tt roundTrip) check(t *testing.T, dyn dynamic.Interface) {
	t.Helper()
	client := tt.kind.client(dyn)
	obj := &unstructured.Unstructured{Object: decode(t, testkit.Must(json.Marshal(tt.obj))(t))}
	obj.SetGroupVersionKind(tt.kind.resource.GroupVersion().WithKind(tt.kind.name))
	obj.SetName(fresh("roundtrip"))
	if tt.kind.name == blockKind.name {
		obj.SetName(obj.GetName() + "-" + string(testkit.Must(json.Marshal(obj.Object["index"]))(t)))
	}
	strict := metav1.FieldValidationStrict
	got, err := client.Create(t.Context(), obj, metav1.CreateOptions{FieldValidation: strict})
	if err != nil {
		t.Fatal(err)
	}
	if status := obj.Object["status"]; status != nil {
		got.Object["status"] = status
		if got, err = client.UpdateStatus(t.Context(), got, metav1.UpdateOptions{FieldValidation: strict}); err != nil {
			t.Fatal(err)
		}
	}
	want := content(obj)
	if tt.defaults != "" {
		for k, v := range tt.kind.object(t, tt.defaults).Object["spec"].(map[string]any) {
			want["spec"].(map[string]any)[k] = v
		}
	}
	if diff := cmp.Diff(want, content(got)); diff != "" {
		t.Errorf("what came back (-sent +got):\n%s", diff)
	}
	// Nothing that the API server stores is unknown to the type.
	back := reflect.New(reflect.TypeOf(tt.obj).Elem()).Interface()
	if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(got.Object, back, true); err != nil {
		t.Errorf("decode what came back: %v", err)
	}
}

// content is an object without its metadata.
func content(obj *unstructured.Unstructured) map[string]any {
	c := obj.DeepCopy().Object
	for _, field := range []string{"apiVersion", "kind", "metadata"} {
		delete(c, field)
	}
	return c
}

// decode decodes a JSON object as the dynamic client does.
func decode(t *testing.T, text []byte) map[string]any {
	t.Helper()
	obj := &unstructured.Unstructured{}
	// UnmarshalJSON insists on a kind.
	var m map[string]json.RawMessage
	if err := json.Unmarshal(text, &m); err != nil {
		t.Fatal(err)
	}
	m["kind"] = json.RawMessage(`"Any"`)
	if err := obj.UnmarshalJSON(testkit.Must(json.Marshal(m))(t)); err != nil {
		t.Fatal(err)
	}
	return obj.Object
}

// noZero reports the fields of a value that aren't set.
func noZero(t *testing.T, v reflect.Value, path string, except []string) {
	t.Helper()
	if slices.Contains(except, path) {
		return
	}
	if v.IsZero() {
		t.Errorf("%s isn't set", path)
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		noZero(t, v.Elem(), path, except)
	case reflect.Slice:
		if v.Len() > 0 {
			noZero(t, v.Index(0), path+"[0]", except)
		}
	case reflect.Struct:
		switch v.Interface().(type) {
		case metav1.Time, intstr.IntOrString:
			return
		}
		for i := range v.NumField() {
			noZero(t, v.Field(i), path+"."+v.Type().Field(i).Name, except)
		}
	}
}
