package rig

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	cnitypes "github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/generated/cnirpc"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

const (
	cniVersion  = "1.1.0"
	networkName = "k8s-pod-network"
)

// SandboxOptions say for which pod a sandbox is. The zero value makes a new pod in
// namespace default.
type SandboxOptions struct {
	Namespace, Name string
	// Labels and Annotations are those of a new pod.
	Labels, Annotations map[string]string
	// NoPod makes no Pod object; coild then needs --enable-egress=false.
	NoPod bool
	// Unbound makes a pod without node, as the scheduler finds it; see Bind.
	Unbound bool
}

// Sandbox is a network namespace of a pod. Commands may run for it at once, but its
// namespace must stay as it is meanwhile.
type Sandbox struct {
	Node                *Node
	ContainerID, IfName string
	Namespace, Name     string
	UID                 string
	// Path is that of the network namespace.
	Path string

	ns *netlab.NS // nil when it is gone

	mu     sync.Mutex
	result []byte // of the latest ADD
}

// Result is what ADD answered.
type Result struct {
	Addrs []netip.Addr
	types100.Result
}

// NewSandbox makes one; its network is not set up yet. If the pod exists already,
// this is a further sandbox of it.
func (n *Node) NewSandbox(ctx context.Context, o SandboxOptions) (*Sandbox, error) {
	n.rig.mu.Lock()
	n.rig.pods++
	if o.Name == "" {
		o.Name = fmt.Sprintf("pod-%d", n.rig.pods)
	}
	n.rig.mu.Unlock()
	if o.Namespace == "" {
		o.Namespace = metav1.NamespaceDefault
	}
	s := &Sandbox{Node: n, ContainerID: randomHex(32), IfName: "eth0", Namespace: o.Namespace, Name: o.Name}
	if !o.NoPod {
		if err := s.createPod(ctx, o); err != nil {
			return nil, err
		}
	}
	s.Path = n.path("netns", s.ContainerID)
	if err := s.MakeNetns(); err != nil {
		return nil, err
	}
	n.mu.Lock()
	n.sandboxes = append(n.sandboxes, s)
	n.mu.Unlock()
	return s, nil
}

func (s *Sandbox) createPod(ctx context.Context, o SandboxOptions) error {
	pods := s.Node.rig.Core.CoreV1().Pods(s.Namespace)
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: s.Name, Labels: o.Labels, Annotations: o.Annotations},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "none"}}},
	}
	if !o.Unbound {
		p.Spec.NodeName = s.Node.Name
	}
	p, err := pods.Create(ctx, p, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		p, err = pods.Get(ctx, s.Name, metav1.GetOptions{})
	}
	if err != nil {
		return fmt.Errorf("create Pod %s/%s: %w", s.Namespace, s.Name, err)
	}
	s.UID = string(p.UID)
	return nil
}

// Bind binds the pod to its node, as the scheduler does.
func (s *Sandbox) Bind(ctx context.Context) error {
	err := s.Node.rig.Core.CoreV1().Pods(s.Namespace).Bind(ctx, &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Namespace: s.Namespace, Name: s.Name, UID: types.UID(s.UID)},
		Target:     corev1.ObjectReference{Kind: "Node", Name: s.Node.Name},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("bind Pod %s/%s to %s: %w", s.Namespace, s.Name, s.Node.Name, err)
	}
	return nil
}

// MakeNetns makes the network namespace at the sandbox's path, instead of one that
// was there. The kernel gives the inode of one that is gone to the next: so that one is
// removed last, and the two differ.
func (s *Sandbox) MakeNetns() error {
	ns, err := netlab.New()
	if err != nil {
		return err
	}
	if err := s.RemoveNetns(); err != nil {
		return errors.Join(err, ns.Close())
	}
	s.ns = ns
	return os.Symlink(ns.Path(), s.Path)
}

// RemoveNetns removes the network namespace, as the runtime does after DEL.
func (s *Sandbox) RemoveNetns() error {
	if s.ns == nil {
		return nil
	}
	err := errors.Join(os.Remove(s.Path), s.ns.Close())
	s.ns = nil
	return err
}

// Close removes the network namespace and forgets the sandbox. The Pod object stays.
func (s *Sandbox) Close() error {
	err := s.RemoveNetns()
	s.Node.mu.Lock()
	defer s.Node.mu.Unlock()
	s.Node.sandboxes = slices.DeleteFunc(s.Node.sandboxes, func(o *Sandbox) bool { return o == s })
	return err
}

// Run runs a program in the sandbox's network namespace and returns its output.
func (s *Sandbox) Run(ctx context.Context, name string, args ...string) (string, error) {
	return s.ns.Run(ctx, name, args...)
}

// Way is where a packet from the sandbox to an address goes, by its routes: "eth0", "tunnel",
// "nowhere", or what the kernel says else.
func (s *Sandbox) Way(ctx context.Context, dst string) string {
	out, err := s.Run(ctx, "ip", "route", "get", dst)
	switch {
	case err != nil && (strings.Contains(err.Error(), "No route to host") || strings.Contains(err.Error(), "unreachable")), strings.Contains(out, "unreachable"):
		return "nowhere"
	case err != nil:
		return err.Error()
	case strings.Contains(out, "dev eth0"):
		return "eth0"
	case strings.Contains(out, "dev fou"):
		return "tunnel"
	}
	return out
}

// Listen listens in the sandbox; network is one of package net's for an IP address.
func (s *Sandbox) Listen(ctx context.Context, network, address string) (net.Listener, error) {
	return s.ns.Listen(ctx, network, address)
}

// Dial connects from the sandbox to an IP address.
func (s *Sandbox) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	return s.ns.Dial(ctx, network, address)
}

// Reach connects from somewhere to an address of the sandbox, and returns the source that the sandbox sees.
func (s *Sandbox) Reach(ctx context.Context, to netip.Addr, dial netlab.Dialer) (netip.Addr, error) {
	return s.ns.Reach(ctx, to, dial)
}

// Ping begins to ping an address from the sandbox.
func (s *Sandbox) Ping(to netip.Addr) (*netlab.Pinger, error) { return s.ns.Pings(s.String(), to) }

// String names the sandbox.
func (s *Sandbox) String() string {
	return fmt.Sprintf("%s of pod %s/%s on %s", s.ContainerID[:12], s.Namespace, s.Name, s.Node.Name)
}

// Plugin is the path of the plugin.
func (n *Node) Plugin() string { return n.rig.bin.coil }

// Conf is the plugin's standard input; more adds keys or replaces them.
func (n *Node) Conf(more map[string]any) ([]byte, error) {
	conf := map[string]any{
		"cniVersion": cniVersion, "name": networkName, "type": "coil", "socket": n.Socket(), "delQueueDir": n.DelQueueDir(),
	}
	for k, v := range more {
		conf[k] = v
	}
	return json.Marshal(conf)
}

// Env is the plugin's environment for a command.
func (s *Sandbox) Env(command string) []string {
	return []string{
		"CNI_COMMAND=" + command, "CNI_CONTAINERID=" + s.ContainerID, "CNI_IFNAME=" + s.IfName, "CNI_NETNS=" + s.Path,
		"CNI_PATH=" + filepath.Dir(s.Node.Plugin()),
		fmt.Sprintf("CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=%s;K8S_POD_NAME=%s;K8S_POD_INFRA_CONTAINER_ID=%s;K8S_POD_UID=%s",
			s.Namespace, s.Name, s.ContainerID, s.UID),
	}
}

// exec runs the plugin. Its errors are of type *types.Error of CNI, unless the
// plugin itself failed.
func (n *Node) exec(ctx context.Context, env []string, conf map[string]any) ([]byte, error) {
	stdin, err := n.Conf(conf)
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, n.Plugin())
	cmd.Env = env
	cmd.Stdin = bytes.NewReader(stdin)
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	if err := cmd.Run(); err != nil {
		if e := (&cnitypes.Error{}); json.Unmarshal(out.Bytes(), e) == nil && e.Msg != "" {
			return nil, e
		}
		return nil, fmt.Errorf("coil: %w: %s%s", err, out.Bytes(), stderr.Bytes())
	}
	return out.Bytes(), nil
}

// Add does ADD by the plugin, or by both.
func (s *Sandbox) Add(ctx context.Context) (Result, error) {
	return s.add(func() ([]byte, error) {
		if s.Node.before != nil {
			return s.addChained(ctx)
		}
		return s.Node.exec(ctx, s.Env("ADD"), nil)
	})
}

// AddRPC does ADD by a call of coild.
func (s *Sandbox) AddRPC(ctx context.Context) (Result, error) {
	return s.add(func() ([]byte, error) {
		args, err := s.args()
		if err != nil {
			return nil, err
		}
		r, err := s.Node.rpc.Add(ctx, args)
		return r.GetResult(), err
	})
}

func (s *Sandbox) add(call func() ([]byte, error)) (Result, error) {
	raw, err := call()
	if err != nil {
		return Result{}, fmt.Errorf("ADD %s: %w", s, err)
	}
	var r Result
	if err := json.Unmarshal(raw, &r.Result); err != nil {
		return Result{}, fmt.Errorf("ADD %s: decode %s: %w", s, raw, err)
	}
	for _, ip := range r.IPs {
		addr, ok := netip.AddrFromSlice(ip.Address.IP)
		if !ok {
			return Result{}, fmt.Errorf("ADD %s: no addresses in %s", s, raw)
		}
		r.Addrs = append(r.Addrs, addr.Unmap())
	}
	s.mu.Lock()
	s.result = raw
	s.mu.Unlock()
	s.Node.rig.Ledger.answered(s, r.Addrs)
	return r, nil
}

// Del does DEL by the plugin, or by both. Until it has succeeded, nobody knows whether the
// sandbox has a network.
func (s *Sandbox) Del(ctx context.Context) error {
	return s.del(func() error {
		if s.Node.before != nil {
			return s.delChained(ctx)
		}
		_, err := s.Node.exec(ctx, s.Env("DEL"), nil)
		return err
	})
}

// DelRPC does DEL by a call of coild.
func (s *Sandbox) DelRPC(ctx context.Context) error {
	return s.del(func() error {
		args, err := s.args()
		if err == nil {
			_, err = s.Node.rpc.Del(ctx, args)
		}
		return err
	})
}

func (s *Sandbox) del(call func() error) error {
	s.Node.rig.Ledger.deleting(s)
	if err := call(); err != nil {
		return fmt.Errorf("DEL %s: %w", s, err)
	}
	return nil
}

// Check does CHECK by the plugin, with the result of ADD.
func (s *Sandbox) Check(ctx context.Context) error {
	s.mu.Lock()
	result := s.result
	s.mu.Unlock()
	if result == nil {
		return fmt.Errorf("CHECK %s: there was no ADD", s)
	}
	if _, err := s.Node.exec(ctx, s.Env("CHECK"), map[string]any{"prevResult": json.RawMessage(result)}); err != nil {
		return fmt.Errorf("CHECK %s: %w", s, err)
	}
	return nil
}

func (s *Sandbox) args() (*cnirpc.CNIArgs, error) {
	stdin, err := s.Node.Conf(nil)
	return &cnirpc.CNIArgs{
		ContainerId: s.ContainerID, Netns: s.Path, Ifname: s.IfName, Path: filepath.Dir(s.Node.Plugin()), StdinData: stdin,
		Args: map[string]string{
			"K8S_POD_NAMESPACE": s.Namespace, "K8S_POD_NAME": s.Name, "K8S_POD_INFRA_CONTAINER_ID": s.ContainerID,
			"K8S_POD_UID": s.UID, "IS_CHAINED": "false",
		},
	}, err
}

// Status does STATUS by the plugin.
func (n *Node) Status(ctx context.Context) error {
	if _, err := n.exec(ctx, []string{"CNI_COMMAND=STATUS", "CNI_PATH=" + filepath.Dir(n.Plugin())}, nil); err != nil {
		return fmt.Errorf("STATUS: %w", err)
	}
	return nil
}

// The spellings of the key of GC's list.
const (
	ValidAttachments = "cni.dev/valid-attachments"
	Attachments      = "cni.dev/attachments"
)

// GC does GC by the plugin: the sandboxes are the valid ones, under each key.
func (n *Node) GC(ctx context.Context, valid []*Sandbox, keys ...string) error {
	list := []cnitypes.GCAttachment{}
	for _, s := range valid {
		list = append(list, cnitypes.GCAttachment{ContainerID: s.ContainerID, IfName: s.IfName})
	}
	conf := map[string]any{}
	for _, k := range keys {
		conf[k] = list
	}
	if _, err := n.exec(ctx, []string{"CNI_COMMAND=GC", "CNI_PATH=" + filepath.Dir(n.Plugin())}, conf); err != nil {
		return fmt.Errorf("GC: %w", err)
	}
	return nil
}
