package main

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"

	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan/pools"
)

const (
	// poolCount is among how many pools the blocks are.
	poolCount = 4
	// parallel is how many writes are in flight. More don't make the API server faster.
	parallel = 16
)

// fleet is a large cluster that consists of objects only.
type fleet struct {
	rig   *rig.Rig
	pools []*v2.AddressPool
	specs []ipam.Pool
	nodes []holder
	// made counts the blocks so far: block i is the one of index i/poolCount of pool i%poolCount.
	made atomic.Int64
	log  io.Writer
}

type holder struct {
	name string
	uid  types.UID
}

// newFleet makes Nodes and pools, but no blocks.
func newFleet(ctx context.Context, r *rig.Rig, nodes int, log io.Writer) (*fleet, error) {
	f := &fleet{rig: r, nodes: make([]holder, nodes), log: log}
	for i := range poolCount {
		name := fmt.Sprintf("pool-%d", i)
		err := r.AddPool(ctx, name, 5, rig.Dual(fmt.Sprintf("10.%d.0.0/10", 64*i), fmt.Sprintf("fd00:10:%d::/106", i)))
		if err != nil {
			return nil, err
		}
		p, err := r.Coil.CoilV2().AddressPools().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return nil, err
		}
		spec, err := pools.Parse(p.Spec)
		if err != nil {
			return nil, err
		}
		f.pools, f.specs = append(f.pools, p), append(f.specs, spec)
	}
	began := time.Now()
	err := each(ctx, nodes, func(ctx context.Context, i int) error {
		n, err := r.Core.CoreV1().Nodes().Create(ctx, nodeObject(i), metav1.CreateOptions{})
		if err != nil {
			return fmt.Errorf("create a Node: %w", err)
		}
		f.nodes[i] = holder{n.Name, n.UID}
		return nil
	})
	fmt.Fprintf(log, "%d Nodes in %s\n", nodes, time.Since(began).Round(time.Second))
	return f, err
}

// each calls do for 0 to n-1, some at once.
func each(ctx context.Context, n int, do func(ctx context.Context, i int) error) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(parallel)
	for i := range n {
		g.Go(func() error { return do(ctx, i) })
	}
	return g.Wait()
}

// addBlocks makes blocks as if they had been carved for requests that are gone.
func (f *fleet) addBlocks(ctx context.Context, n int) error {
	began := time.Now()
	err := each(ctx, n, func(ctx context.Context, i int) error {
		_, err := f.block(ctx, f.nodes[i%len(f.nodes)], uuid.NewUUID())
		return err
	})
	fmt.Fprintf(f.log, "%d AddressBlocks in %s\n", n, time.Since(began).Round(time.Second))
	return err
}

// block makes the next block.
func (f *fleet) block(ctx context.Context, n holder, request types.UID) (*v2.AddressBlock, error) {
	i := int(f.made.Add(1) - 1)
	pool, index := f.pools[i%poolCount], int32(i/poolCount)
	b, err := f.specs[i%poolCount].Block(index)
	if err != nil {
		return nil, err
	}
	o := pools.NewBlock(pool, index, b, pools.Holder{NodeName: n.name, NodeUID: n.uid, RequestUID: request})
	made, err := f.rig.Coil.CoilV2().AddressBlocks().Create(ctx, o, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("create AddressBlock %s: %w", o.Name, err)
	}
	return made, nil
}

// skip leaves out the blocks that the controller may have carved after those of the
// fleet.
func (f *fleet) skip() { f.made.Add(poolCount * 50000) }

func nodeName(i int) string { return fmt.Sprintf("worker-%05d.example.internal", i) }

// nodeObject is a Node as kubelet and the cloud's controllers leave it: it has about
// the size that it has in a cluster in use, 50 images included.
func nodeObject(i int) *corev1.Node {
	name := nodeName(i)
	v4 := netip.AddrFrom4([4]byte{172, 16, byte(i >> 8), byte(i)})
	now := metav1.Now()
	n := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name: name,
			Labels: map[string]string{
				"beta.kubernetes.io/arch": "amd64", "beta.kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64", "kubernetes.io/os": "linux",
				"kubernetes.io/hostname": name, "topology.kubernetes.io/region": "region-1", "topology.kubernetes.io/zone": fmt.Sprintf("zone-%d", i%6),
				"node.kubernetes.io/instance-type": "r1.large", "node-role.kubernetes.io/worker": "",
			},
			Annotations: map[string]string{
				"node.alpha.kubernetes.io/ttl": "0", "volumes.kubernetes.io/controller-managed-attach-detach": "true",
				"csi.volume.kubernetes.io/nodeid": fmt.Sprintf(`{"csi.example.com":%q}`, name),
			},
		},
		Spec: corev1.NodeSpec{ProviderID: "metal://rack/" + name},
		Status: corev1.NodeStatus{
			Addresses: []corev1.NodeAddress{
				{Type: corev1.NodeInternalIP, Address: v4.String()},
				{Type: corev1.NodeInternalIP, Address: fmt.Sprintf("fd00:172::%x", i+1)},
				{Type: corev1.NodeHostName, Address: name},
			},
			NodeInfo: corev1.NodeSystemInfo{
				MachineID: string(uuid.NewUUID()), SystemUUID: string(uuid.NewUUID()), BootID: string(uuid.NewUUID()),
				KernelVersion: "6.12.0", OSImage: "Debian GNU/Linux 12 (bookworm)", ContainerRuntimeVersion: "containerd://2.3.0",
				KubeletVersion: "v1.36.3", OperatingSystem: "linux", Architecture: "amd64",
			},
			Capacity: corev1.ResourceList{}, Allocatable: corev1.ResourceList{},
		},
	}
	for _, r := range []string{"cpu", "memory", "pods", "ephemeral-storage", "hugepages-1Gi", "hugepages-2Mi"} {
		n.Status.Capacity[corev1.ResourceName(r)], n.Status.Allocatable[corev1.ResourceName(r)] = resource.MustParse("128"), resource.MustParse("120")
	}
	for _, c := range []corev1.NodeConditionType{corev1.NodeMemoryPressure, corev1.NodeDiskPressure, corev1.NodePIDPressure, corev1.NodeReady} {
		n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{
			Type: c, Status: corev1.ConditionTrue, LastHeartbeatTime: now, LastTransitionTime: now,
			Reason: "KubeletHasSufficientMemory", Message: "kubelet has sufficient memory available",
		})
	}
	for j := range 50 {
		n.Status.Images = append(n.Status.Images, corev1.ContainerImage{SizeBytes: 1 << 27, Names: []string{
			fmt.Sprintf("registry.example.com/team-%d/application-%d@sha256:%064x", j%7, j, i*50+j),
			fmt.Sprintf("registry.example.com/team-%d/application-%d:v1.%d.0", j%7, j, j),
		}})
	}
	return n
}
