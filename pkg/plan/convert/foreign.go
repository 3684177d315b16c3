package convert

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Groups and versions of the two systems.
const (
	gatewayGroup, gatewayVersion = "egressgateway.spidernet.io", "v1beta1"
	staticGroup, staticVersion   = "staticegressips.nirmata.io", "v1alpha1"
)

// labelDefault on a Namespace names the EgressGateway of its policies that name none.
const labelDefault = "spidernet.io/egressgateway-default"

// typed is what all objects have.
type typed struct {
	metav1.TypeMeta `json:",inline"`
	Metadata        metav1.ObjectMeta `json:"metadata"`
}

// egressGateway is an EgressGateway, v0.6.9.
type egressGateway struct {
	typed `json:",inline"`
	Spec  struct {
		ClusterDefault bool `json:"clusterDefault"`
		IPPools        struct {
			IPv4        []string `json:"ipv4"`
			IPv6        []string `json:"ipv6"`
			IPv4Default string   `json:"ipv4DefaultEIP"`
			IPv6Default string   `json:"ipv6DefaultEIP"`
		} `json:"ippools"`
		NodeSelector struct {
			Selector *metav1.LabelSelector `json:"selector"`
			Policy   string                `json:"policy"`
		} `json:"nodeSelector"`
	} `json:"spec"`
	Status struct {
		NodeList []struct {
			Name   string `json:"name"`
			Status string `json:"status"`
			EIPs   []struct {
				family   `json:",inline"`
				Policies []struct {
					Name      string `json:"name"`
					Namespace string `json:"namespace"`
				} `json:"policies"`
			} `json:"eips"`
		} `json:"nodeList"`
		IPUsage struct {
			IPv4Total int `json:"ipv4Total"`
			IPv4Free  int `json:"ipv4Free"`
			IPv6Total int `json:"ipv6Total"`
			IPv6Free  int `json:"ipv6Free"`
		} `json:"ipUsage"`
	} `json:"status"`
}

// family is an address of each family, either of which may be empty.
type family struct {
	IPv4 string `json:"ipv4"`
	IPv6 string `json:"ipv6"`
}

// gatewayPolicy is an EgressPolicy or an EgressClusterPolicy of EgressGateway.
type gatewayPolicy struct {
	typed `json:",inline"`
	Spec  struct {
		EgressGatewayName string `json:"egressGatewayName"`
		EgressIP          struct {
			family          `json:",inline"`
			UseNodeIP       bool   `json:"useNodeIP"`
			AllocatorPolicy string `json:"allocatorPolicy"`
		} `json:"egressIP"`
		AppliedTo struct {
			PodSelector *metav1.LabelSelector `json:"podSelector"`
			PodSubnet   []string              `json:"podSubnet"`
			// NamespaceSelector is of an EgressClusterPolicy only.
			NamespaceSelector *metav1.LabelSelector `json:"namespaceSelector"`
		} `json:"appliedTo"`
		DestSubnet []string `json:"destSubnet"`
		Priority   *int64   `json:"priority"`
	} `json:"spec"`
	Status struct {
		EIP  family `json:"eip"`
		Node string `json:"node"`
	} `json:"status"`
}

// clusterInfo is the EgressClusterInfo: what no policy without destinations captures.
type clusterInfo struct {
	typed `json:",inline"`
	Spec  struct {
		AutoDetect struct {
			PodCIDRMode *string `json:"podCidrMode"`
			ClusterIP   *bool   `json:"clusterIP"`
			NodeIP      *bool   `json:"nodeIP"`
		} `json:"autoDetect"`
		ExtraCIDR []string `json:"extraCidr"`
	} `json:"spec"`
	Status struct {
		NodeIP      map[string]families `json:"nodeIP"`
		PodCIDR     map[string]families `json:"podCIDR"`
		ClusterIP   families            `json:"clusterIP"`
		ExtraCIDR   []string            `json:"extraCidr"`
		PodCIDRMode string              `json:"podCidrMode"`
	} `json:"status"`
}

// families are addresses or ranges of each family.
type families struct {
	IPv4 []string `json:"ipv4"`
	IPv6 []string `json:"ipv6"`
}

// staticEgressIP is a StaticEgressIP. Nothing validates it there.
type staticEgressIP struct {
	typed `json:",inline"`
	Spec  struct {
		Rules []struct {
			ServiceName string `json:"service-name"`
			CIDR        string `json:"cidr"`
			EgressIP    string `json:"egressip"`
		} `json:"rules"`
	} `json:"spec"`
	Status struct {
		GatewayNode string `json:"gateway-node"`
		GatewayIP   string `json:"gateway-ip"`
	} `json:"status"`
}
