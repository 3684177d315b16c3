package cluster

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/integration/lab/machine"
	"github.com/coil-net/coil/integration/lab/pki"
)

const (
	containerdSocket = "/run/containerd/containerd.sock"
	pluginDir        = "/opt/cni/bin"
)

// kernelSettings are what kubelet sets on its machine. No namespace isolates them, so kubelet
// finds them set in files that lie over the real ones
// (kubernetes/pkg/kubelet/cm/container_manager_linux.go, setupKernelTunables).
var kernelSettings = map[string]string{
	"vm/overcommit_memory":      "1",
	"vm/panic_on_oom":           "0",
	"kernel/panic":              "10",
	"kernel/panic_on_oops":      "1",
	"kernel/keys/root_maxkeys":  "1000000",
	"kernel/keys/root_maxbytes": "25000000",
}

// installNode writes a new node's disk.
func (c *Cluster) installNode(n node) error {
	dir := c.Machine(n.Name)
	for _, d := range []string{dir.Upper("etc/kubernetes"), dir.Upper("etc/containerd"), dir.Upper("etc/cni/net.d"), dir.Disk(pluginDir)} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	// Nothing of the host's own configuration of these may shine through the overlay.
	for _, d := range []string{"kubernetes", "containerd", "cni"} {
		if err := unix.Setxattr(dir.Upper("etc/"+d), "trusted.overlay.opaque", []byte("y"), 0); err != nil {
			return fmt.Errorf("make %s opaque: %w", dir.Upper("etc/"+d), err)
		}
	}
	files, err := c.nodeFiles(n)
	if err != nil {
		return err
	}
	for name, content := range files {
		if err := os.WriteFile(dir.Upper("etc/"+name), []byte(content), 0o644); err != nil {
			return err
		}
	}
	if err := c.issueNode(n, dir); err != nil {
		return err
	}
	plugins := []string{"loopback"}
	if c.referenceCNI() {
		plugins = append(plugins, "ptp", "host-local")
	}
	for _, p := range plugins {
		if err := copyFile(c.programs()[p], filepath.Join(dir.Disk(pluginDir), p)); err != nil {
			return err
		}
	}
	return nil
}

// nodeFiles returns the files below a node's /etc.
func (c *Cluster) nodeFiles(n node) (map[string]string, error) {
	kubelet, err := kubeletConfig()
	if err != nil {
		return nil, err
	}
	proxy, err := kubeProxyConfig(n.ProxyMode)
	if err != nil {
		return nil, err
	}
	files := map[string]string{
		"hostname":   n.Name + "\n",
		"hosts":      c.hosts(),
		"machine-id": n.MachineID + "\n",
		// No name server is reachable; without an address the resolver would ask this machine.
		"resolv.conf":                "options timeout:1 attempts:1\n",
		"containerd/config.toml":     containerdConfig,
		"kubernetes/kubelet.yaml":    kubelet,
		"kubernetes/kube-proxy.yaml": proxy,
	}
	if c.referenceCNI() {
		conflist, err := referenceConflist(c.families(), n.Index)
		if err != nil {
			return nil, err
		}
		files["cni/net.d/20-reference.conflist"] = conflist
	}
	return files, nil
}

func (c *Cluster) hosts() string {
	var b strings.Builder
	b.WriteString("127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n")
	for i, name := range c.Nodes() {
		for _, f := range c.families() {
			fmt.Fprintf(&b, "%s %s\n", f.node(i).Addr(), name)
		}
	}
	return b.String()
}

// issueNode makes the certificates and kubeconfigs of a node.
func (c *Cluster) issueNode(n node, dir machine.Dir) error {
	ca, err := pki.Open(c.pkiDir())
	if err != nil {
		return err
	}
	etc := dir.Upper("etc/kubernetes")
	if err := os.WriteFile(filepath.Join(etc, pki.CACertFile), ca.CA(), 0o644); err != nil {
		return err
	}
	user := pki.Subject{User: "system:node:" + n.Name, Groups: []string{"system:nodes"}}
	serving := user
	serving.DNSNames = []string{n.Name}
	for _, f := range c.families() {
		serving.Addrs = append(serving.Addrs, f.node(n.Index).Addr())
	}
	if err := ca.WriteCert(etc, "kubelet", serving); err != nil {
		return err
	}
	url := c.controlPlane().URL()
	if err := ca.WriteKubeconfig(filepath.Join(etc, "kubelet.kubeconfig"), url, "lab", user); err != nil {
		return err
	}
	proxy := pki.Subject{User: "system:kube-proxy"}
	return ca.WriteKubeconfig(filepath.Join(etc, "kube-proxy.kubeconfig"), url, "lab", proxy)
}

// nodeSpec describes a node's machine; every call gives it a new boot ID.
func (c *Cluster) nodeSpec(n node) machine.Spec {
	bin := c.programs()
	inside := func(name string) string {
		return path.Join(machine.ProgramDir, filepath.Base(bin.Dir(name)), name)
	}
	var addrs []netip.Addr
	for _, f := range c.families() {
		addrs = append(addrs, f.node(n.Index).Addr())
	}
	return machine.Spec{
		Hostname:  n.Name,
		BootID:    newUUID(),
		MachineID: n.MachineID,
		Root:      true,
		Programs:  c.programDirs(),
		Shadow:    kernelSettings,
		Components: []machine.Component{
			{Name: "containerd", Path: inside("containerd"), Args: []string{"--config=/etc/containerd/config.toml"}},
			{
				Name: "kubelet", Path: inside("kubelet"), After: containerdSocket,
				Args: []string{
					"--config=/etc/kubernetes/kubelet.yaml",
					"--kubeconfig=/etc/kubernetes/kubelet.kubeconfig",
					"--hostname-override=" + n.Name,
					"--node-ip=" + joinAddrs(addrs),
				},
			},
			{
				Name: "kube-proxy", Path: inside("kube-proxy"),
				Args: []string{"--config=/etc/kubernetes/kube-proxy.yaml", "--hostname-override=" + n.Name},
			},
		},
	}
}

// programDirs returns the directories of the programs that run on nodes.
func (c *Cluster) programDirs() []string {
	bin := c.programs()
	dirs := []string{bin.Dir("kubelet"), bin.Dir("containerd")}
	slices.Sort(dirs)
	return slices.Compact(dirs)
}

// powerOn starts a node's machine and connects it.
func (c *Cluster) powerOn(ctx context.Context, n node) error {
	fabric, err := c.init(Fabric)
	if err != nil {
		return err
	}
	return c.startMachine(ctx, n.Name, machine.Options{
		Spec: c.nodeSpec(n),
		Prepare: func(ctx context.Context, i machine.Init) error {
			if err := c.recordInit(n.Name, &i); err != nil {
				return err
			}
			return c.wireNode(ctx, fabric, i, n.Index)
		},
	})
}

func (c *Cluster) recordInit(name string, i *machine.Init) error {
	return c.record(func(s *state) {
		for j := range s.Nodes {
			if s.Nodes[j].Name == name {
				s.Nodes[j].Init = i
			}
		}
	})
}

func joinAddrs(addrs []netip.Addr) string {
	s := make([]string, len(addrs))
	for i, a := range addrs {
		s[i] = a.String()
	}
	return strings.Join(s, ",")
}

func newMachineID() string {
	var b [16]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// newUUID returns a random UUID (RFC 9562, version 4), which is what Linux uses as a boot ID.
func newUUID() string {
	var b [16]byte
	rand.Read(b[:])
	b[6] = b[6]&0x0f | 0x40
	b[8] = b[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

func copyFile(src, dst string) error {
	b, err := os.ReadFile(src)
	if err != nil {
		return err
	}
	return os.WriteFile(dst, b, 0o755)
}
