package rig

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/plan"
)

// list writes, as kube-controller-manager does, the EndpointSlices of the Egress's Service and the status of its Deployment, if they have changed.
func (e *Egress) list(ctx context.Context) error {
	slices, ready, all := e.slices()
	text, err := json.Marshal(slices)
	if err != nil || string(text) == e.listed {
		return err
	}
	api := e.rig.Core.DiscoveryV1().EndpointSlices(e.Namespace)
	var errs []error
	for _, s := range slices {
		_, err := api.Create(ctx, s, metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			_, err = api.Update(ctx, s, metav1.UpdateOptions{})
		}
		errs = append(errs, err)
	}
	patch := fmt.Appendf(nil, `{"status":{"replicas":%d,"readyReplicas":%d}}`, all, ready)
	// coil-egress-controller makes the Deployment a little later.
	_, err = e.rig.Core.AppsV1().Deployments(e.Namespace).Patch(ctx, e.Name, types.MergePatchType, patch, metav1.PatchOptions{}, "status")
	if err := errors.Join(append(errs, err)...); err != nil {
		return err
	}
	e.listed = string(text)
	return nil
}

// slices are the EndpointSlices of the Service, one of each family, and how many routers are ready, of how many.
func (e *Egress) slices() (lists []*discoveryv1.EndpointSlice, ready, all int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, family := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6} {
		s := &discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: e.Namespace, Name: fmt.Sprintf("%s-%c", e.Name, family[3]), Labels: plan.RouterLabels(e.Name)},
			AddressType: family,
		}
		s.Labels[discoveryv1.LabelServiceName] = e.Name
		for _, r := range e.routers {
			for _, a := range r.Addrs {
				if a.Is4() != (family == discoveryv1.AddressTypeIPv4) {
					continue
				}
				s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
					Addresses: []string{a.String()}, NodeName: &r.Node.Name,
					Conditions: discoveryv1.EndpointConditions{Ready: new(r.ready && !r.ending), Serving: new(r.ready), Terminating: new(r.ending)},
					TargetRef:  &corev1.ObjectReference{Kind: "Pod", Namespace: e.Namespace, Name: r.Name, UID: types.UID(r.UID)},
				})
			}
		}
		lists = append(lists, s)
	}
	for _, r := range e.routers {
		if r.ready {
			ready++
		}
	}
	return lists, ready, len(e.routers)
}
