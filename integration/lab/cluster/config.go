package cluster

import (
	"encoding/json"
	"fmt"

	"github.com/coil-net/coil/integration/lab/image"
	"github.com/coil-net/coil/integration/lab/pki"
)

// maxPods is far above kubelet's default of 110: tests pack nodes.
const maxPods = 1100

// containerdConfig is the same on every node. restrict_oom_score_adj lets pods of high priority
// start where root lacks CAP_SYS_RESOURCE.
const containerdConfig = `version = 4
root = "/var/lib/containerd"
state = "/run/containerd"

[plugins.'io.containerd.server.v1.grpc']
  address = "` + containerdSocket + `"

[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "` + image.Pause + `"

[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true

  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"

    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      SystemdCgroup = false

  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["` + pluginDir + `"]
    conf_dir = "/etc/cni/net.d"
`

// StaticPodDir is where kubelets look for the manifests of static Pods.
const StaticPodDir = "/var/lib/kubelet/manifests"

// kubeletConfig works with cgroups of both versions: it leaves them to the container runtime.
func kubeletConfig() (string, error) {
	return toJSON(map[string]any{
		"apiVersion": "kubelet.config.k8s.io/v1beta1",
		"kind":       "KubeletConfiguration",
		"authentication": map[string]any{
			"anonymous": map[string]any{"enabled": false},
			"webhook":   map[string]any{"enabled": true},
			"x509":      map[string]any{"clientCAFile": "/etc/kubernetes/" + pki.CACertFile},
		},
		"authorization":            map[string]any{"mode": "Webhook"},
		"tlsCertFile":              "/etc/kubernetes/kubelet.crt",
		"tlsPrivateKeyFile":        "/etc/kubernetes/kubelet.key",
		"containerRuntimeEndpoint": "unix://" + containerdSocket,
		"cgroupDriver":             "cgroupfs",
		"cgroupRoot":               "/",
		"cgroupsPerQOS":            false,
		"enforceNodeAllocatable":   []string{},
		"failCgroupV1":             false,
		"failSwapOn":               false,
		"clusterDomain":            "cluster.local",
		// The default is below /usr, which is the real machine's.
		"volumePluginDir": "/var/lib/kubelet/volume-plugins",
		"staticPodPath":   StaticPodDir,
		"maxPods":         maxPods,
		// Imported images can't be pulled again, whatever the disk of the real machine is like.
		"imageGCHighThresholdPercent": 100,
		"imageGCLowThresholdPercent":  99,
		"evictionHard": map[string]string{
			"memory.available": "50Mi", "nodefs.available": "0%", "nodefs.inodesFree": "0%", "imagefs.available": "0%",
		},
	})
}

// kubeProxyConfig leaves alone what belongs to the real machine: the size of the connection
// tracking table. Without a cluster CIDR all traffic counts as local.
func kubeProxyConfig(mode string) (string, error) {
	return toJSON(map[string]any{
		"apiVersion":       "kubeproxy.config.k8s.io/v1alpha1",
		"kind":             "KubeProxyConfiguration",
		"mode":             mode,
		"clientConnection": map[string]any{"kubeconfig": "/etc/kubernetes/kube-proxy.kubeconfig"},
		"conntrack": map[string]any{
			"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s",
		},
	})
}

// referenceConflist configures ptp and host-local with the node's subnet of each family.
func referenceConflist(families []Family, index int) (string, error) {
	var ranges [][]map[string]string
	var routes []map[string]string
	for _, f := range families {
		ranges = append(ranges, []map[string]string{{"subnet": f.podSubnet(index).String()}})
		routes = append(routes, map[string]string{"dst": plans[f].all.String()})
	}
	return toJSON(map[string]any{
		"cniVersion": "1.0.0",
		"name":       "reference",
		"plugins": []map[string]any{{
			"type": "ptp",
			"ipam": map[string]any{"type": "host-local", "ranges": ranges, "routes": routes},
		}},
	})
}

func toJSON(v any) (string, error) {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return "", fmt.Errorf("encode configuration: %w", err)
	}
	return string(b) + "\n", nil
}
