// Package kube connects to the Kubernetes API server: configuration, clients,
// transforms of cached objects, events and leader election.
//
// It owns how Coil talks to the API server. It must not know what is asked for.
package kube

import (
	"fmt"
	"os"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/coil-net/coil/generated/clientset/versioned"
)

// Clients are the clients of one program.
type Clients struct {
	// Core speaks protobuf.
	Core kubernetes.Interface
	// Coil speaks JSON, as custom resources do.
	Coil versioned.Interface
	// Metadata reads the metadata of objects whose rest isn't of interest.
	Metadata metadata.Interface
}

// Config returns the configuration for a program: from the kubeconfig file if
// one is named, else from the pod that it runs in. The user agent names the
// program, for the API server's audit log.
func Config(kubeconfig, program string) (*rest.Config, error) {
	var cfg *rest.Config
	var err error
	if kubeconfig != "" {
		cfg, err = clientcmd.BuildConfigFromFlags("", kubeconfig)
	} else {
		cfg, err = rest.InClusterConfig()
	}
	if err != nil {
		return nil, fmt.Errorf("find the API server (outside a cluster, give --kubeconfig): %w", err)
	}
	cfg.UserAgent = program
	// client-go's default of 5 requests a second is for interactive tools. Requests come
	// in bursts, when a cluster starts or a node gets many pods, and the API server's
	// priority and fairness shares it out better than a limit that knows nothing of its
	// load; the number of workers bounds what is in flight.
	cfg.QPS = -1
	// The API server has a warning about the name of our finalizer in each answer.
	cfg.WarningHandler = rest.NewWarningWriter(os.Stderr, rest.WarningWriterOptions{Deduplicate: true})
	return cfg, nil
}

// NewClients returns the clients of cfg, which isn't changed.
func NewClients(cfg *rest.Config) (Clients, error) {
	var c Clients
	core := rest.CopyConfig(cfg)
	core.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	core.ContentType = runtime.ContentTypeProtobuf
	var err error
	if c.Core, err = kubernetes.NewForConfig(core); err != nil {
		return Clients{}, fmt.Errorf("core client: %w", err)
	}
	if c.Metadata, err = metadata.NewForConfig(cfg); err != nil {
		return Clients{}, fmt.Errorf("metadata client: %w", err)
	}
	if c.Coil, err = versioned.NewForConfig(cfg); err != nil {
		return Clients{}, fmt.Errorf("coil client: %w", err)
	}
	return c, nil
}
