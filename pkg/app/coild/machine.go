package coild

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/node"
)

// machineSettle is for how long the Node must be this machine's again, after it was another's, before
// coild serves. While two machines have one name, the kubelet of each writes its own machine's ID into
// the Node every ten seconds.
const machineSettle = time.Minute

// machine tells whether the Node is this machine's.
type machine struct {
	// id is the machine's; empty if it has none.
	id string
	// clash is when the Node was another machine's last; zero once that has settled.
	clash time.Time
}

// readMachine reads the machine's ID as kubelet does. A machine without one can't be told from
// others.
func readMachine(ctx context.Context, path string) (machine, error) {
	if path == "" {
		return machine{}, nil
	}
	text, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return machine{}, fmt.Errorf("read the machine's ID (--machine-id-file): %w", err)
	}
	id := strings.TrimSpace(string(text))
	// machine-id(5): systemd writes this word before the first boot is complete.
	if id == "" || id == "uninitialized" {
		klog.FromContext(ctx).Info("The machine has no ID, so that a Node of another machine isn't noticed", "file", path)
		return machine{}, nil
	}
	return machine{id: id}, nil
}

// check returns an error as long as the Node isn't this machine's, or was another's a moment ago, and
// then how long that takes still.
func (m *machine) check(n *corev1.Node, now time.Time) (time.Duration, error) {
	other := n.Status.NodeInfo.MachineID
	if m.id != "" && other != "" && other != m.id {
		m.clash = now
		return 0, fmt.Errorf("the Node %s is another machine's: its status.nodeInfo.machineID is %s, and this machine's ID (--machine-id-file) is %s: "+
			"stop the machine that shouldn't have this name, or restart kubelet if the ID of this one has changed: %w", n.Name, other, m.id, node.ErrWithdrawn)
	}
	left := m.clash.Add(machineSettle).Sub(now)
	if m.clash.IsZero() || left <= 0 {
		m.clash = time.Time{}
		return 0, nil
	}
	return left, fmt.Errorf("the Node %s was another machine's less than %s ago: %w", n.Name, machineSettle, node.ErrWithdrawn)
}

// checkMachine is check for the part that gives addresses, which could be given twice; it tells the admin.
func (d *daemon) checkMachine(n *corev1.Node) (time.Duration, error) {
	first := d.machine.clash.IsZero()
	left, err := d.machine.check(n, time.Now())
	if err != nil && first {
		d.warnOf(n.UID, "OtherMachine", "%v", err)
	}
	return left, err
}

// timeCheck is how often coild looks whether the API server has gone back in time, though no event came.
const timeCheck = 5 * time.Minute

// apiTime notices that the API server has gone back in time, as after etcd was restored from a backup. A watch from
// the lost time goes on without events. Its cache may be wrong then.
type apiTime struct{ latest string } // the largest resourceVersion of the Node

// check returns an error if a Node as the API server has it now is older than before.
func (a *apiTime) check(n *corev1.Node) error {
	// https://kubernetes.io/docs/reference/using-api/api-concepts/#resource-versions: since 1.35 they can be compared,
	// and with etcd they always could.
	order, err := resourceversion.CompareResourceVersion(n.ResourceVersion, a.latest)
	switch {
	case a.latest == "", err == nil && order >= 0:
		a.latest = n.ResourceVersion
	case err == nil: // else they are of another kind of store
		return fmt.Errorf("the Node %s has resourceVersion %s and had %s: the API server is of an earlier time, as after a restore of etcd; starting anew", n.Name, n.ResourceVersion, a.latest)
	}
	return nil
}
