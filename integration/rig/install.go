package rig

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"

	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/integration/lab/cache"
	"github.com/coil-net/coil/integration/lab/controlplane"
	"github.com/coil-net/coil/pkg/plan/keys"
	"github.com/coil-net/coil/pkg/testkit"
)

// installation is the version of the function install. Raise it when the function changes: the cache has the result of each version.
const installation = 1

// installed are the folders of manifests that every rig has.
var installed = []string{"crd", "rbac"}

// startInstalled starts an API server in which definitions and rights are installed. The installation takes a processor for seconds and has the
// same result for all rigs: the cache keeps the objects.
func startInstalled(ctx context.Context, o controlplane.Options) (*controlplane.API, error) {
	root, err := build.Root()
	if err != nil {
		return nil, err
	}
	name, err := nameOfInstallation(ctx, root, o)
	if err != nil {
		return nil, err
	}
	o.Data, err = cache.Once(ctx, name, o.Log, func(file string) error {
		api, err := controlplane.StartAPI(ctx, controlplane.Options{KubernetesVersion: o.KubernetesVersion, Log: o.Log})
		if err != nil {
			return err
		}
		err = install(ctx, api, root)
		if err == nil {
			err = api.SaveData(ctx, file)
		}
		return errors.Join(err, api.Stop())
	})
	if err != nil {
		return nil, fmt.Errorf("install definitions and rights: %w", err)
	}
	return controlplane.StartAPI(ctx, o)
}

// nameOfInstallation returns the name of the cache's file. Other programs and other manifests have another name.
func nameOfInstallation(ctx context.Context, root string, o controlplane.Options) (string, error) {
	b := build.Builder{KubernetesVersion: o.KubernetesVersion, Log: o.Log}
	bin, err := b.Programs(ctx, controlplane.Etcd, controlplane.APIServer)
	if err != nil {
		return "", err
	}
	sum := sha256.New()
	fmt.Fprintln(sum, installation, bin[controlplane.Etcd], bin[controlplane.APIServer])
	for _, dir := range installed {
		files, err := filepath.Glob(filepath.Join(root, "manifests", dir, "*.yaml"))
		if err != nil {
			return "", err
		}
		for _, path := range files {
			if err := addFile(sum, path); err != nil {
				return "", err
			}
		}
	}
	return "installed-" + hex.EncodeToString(sum.Sum(nil)[:6]), nil
}

// addFile adds a file to a sum, with its name and length.
func addFile(sum io.Writer, path string) error {
	content, err := os.ReadFile(path)
	if err == nil {
		_, err = fmt.Fprintf(sum, "%s %d\n%s", filepath.Base(path), len(content), content)
	}
	return err
}

// install installs definitions and rights as users do.
func install(ctx context.Context, api *controlplane.API, root string) error {
	core, err := kubernetes.NewForConfig(api.RESTConfig())
	if err != nil {
		return err
	}
	err = wait.PollUntilContextTimeout(ctx, 20*time.Millisecond, testkit.Timeout(20*time.Second), true, func(ctx context.Context) (bool, error) {
		_, err := core.CoreV1().Namespaces().Get(ctx, metav1.NamespaceSystem, metav1.GetOptions{})
		return err == nil, nil
	})
	if err != nil {
		return fmt.Errorf("wait for namespace kube-system: %w", err)
	}
	for _, dir := range installed {
		if _, err := api.Kubectl(ctx, "apply", "-k", filepath.Join(root, "manifests", dir)); err != nil {
			return err
		}
	}
	_, err = api.Kubectl(ctx, "wait", "--for=condition=Established", "--timeout=30s", "crd", "--all")
	return err
}

// makeKeyring makes what the manifests of coil-ipam-controller have beside its rights.
func (r *Rig) makeKeyring(ctx context.Context) error {
	_, err := r.Core.CoreV1().Secrets(keys.Namespace).Create(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: keys.Name}}, metav1.CreateOptions{})
	return err
}

// awaitDefinitions returns when Coil's resources are served: an established definition may still be answered with "not found" for a moment.
func (r *Rig) awaitDefinitions(ctx context.Context) error {
	return wait.PollUntilContextTimeout(ctx, 20*time.Millisecond, testkit.Timeout(20*time.Second), true, func(ctx context.Context) (bool, error) {
		_, pools := r.Coil.CoilV2().AddressPools().List(ctx, metav1.ListOptions{Limit: 1})
		_, blocks := r.Coil.CoilV2().AddressBlocks().List(ctx, metav1.ListOptions{Limit: 1})
		_, requests := r.Coil.CoilV2().BlockRequests().List(ctx, metav1.ListOptions{Limit: 1})
		return errors.Join(pools, blocks, requests) == nil, nil
	})
}
