package lbcontroller

import (
	"context"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/controller/cloudaddress"
	"github.com/coil-net/coil/pkg/openstack"
)

// open returns a function that opens the clouds of pools.
func (o *Options) open(core kubernetes.Interface, metrics *cloudaddress.Metrics) func(context.Context, v2.PoolOpenStack) (cloudaddress.Cloud, error) {
	return func(ctx context.Context, at v2.PoolOpenStack) (cloudaddress.Cloud, error) {
		id := o.ClusterID
		if id == "" {
			cluster, err := core.CoreV1().Namespaces().Get(ctx, metav1.NamespaceSystem, metav1.GetOptions{})
			if err != nil {
				return nil, fmt.Errorf("read the namespace %s, whose UID is the cluster's ID: %w", metav1.NamespaceSystem, err)
			}
			id = string(cluster.UID)
		}
		return openstack.New(openstack.Config{
			CloudsFile: o.CloudsFile, Cloud: at.Cloud, ClusterID: id, SubnetIDs: at.SubnetIDs, FloatingNetworkID: at.FloatingNetworkID, Observe: metrics.Observe,
		})
	}
}
