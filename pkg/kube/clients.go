// Package kube connects to the Kubernetes API server: configuration, clients,
// informers and events.
//
// It owns how Coil talks to the API server. It must not know what is asked for, nor
// link client-go's clients of all of Kubernetes' resources: they are more than half of
// a program's memory, on every node.
package kube

import (
	"errors"
	"fmt"
	"os"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	typed "github.com/coil-net/coil/generated/clientset/versioned/typed/coil/v2"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// Clients are the clients of one program.
type Clients struct {
	// Core knows the resources of the group "", version v1, and speaks protobuf.
	Core rest.Interface
	// Discovery knows the resources of the group discovery.k8s.io, version v1, alike.
	Discovery rest.Interface
	// Coil speaks JSON, as custom resources do.
	Coil typed.CoilV2Interface
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
	// load; the number of workers bounds the requests in flight.
	cfg.QPS = -1
	Patient(cfg)
	// The API server has a warning about the name of our finalizer in each answer.
	cfg.WarningHandler = rest.NewWarningWriter(os.Stderr, rest.WarningWriterOptions{Deduplicate: true})
	return cfg, nil
}

// Protobuf returns a copy of cfg for clients of Kubernetes' own resources: protobuf is
// a fraction of JSON's work for both sides.
func Protobuf(cfg *rest.Config) *rest.Config {
	c := rest.CopyConfig(cfg)
	c.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	c.ContentType = runtime.ContentTypeProtobuf
	return c
}

// NewClients returns the clients of cfg, which isn't changed. They share their connections: client-go alone would give each one its own if cfg has a
// Dial.
func NewClients(cfg *rest.Config) (Clients, error) {
	var c Clients
	scheme, err := newScheme()
	if err != nil {
		return Clients{}, err
	}
	shared, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return Clients{}, fmt.Errorf("HTTP client: %w", err)
	}
	core := Protobuf(cfg)
	core.APIPath, core.GroupVersion = "/api", &corev1.SchemeGroupVersion
	core.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	if c.Core, err = rest.RESTClientForConfigAndClient(core, shared); err != nil {
		return Clients{}, fmt.Errorf("core client: %w", err)
	}
	discovery := rest.CopyConfig(core)
	discovery.APIPath, discovery.GroupVersion = "/apis", &discoveryv1.SchemeGroupVersion
	if c.Discovery, err = rest.RESTClientForConfigAndClient(discovery, shared); err != nil {
		return Clients{}, fmt.Errorf("discovery client: %w", err)
	}
	if c.Metadata, err = metadata.NewForConfigAndClient(cfg, shared); err != nil {
		return Clients{}, fmt.Errorf("metadata client: %w", err)
	}
	if c.Coil, err = typed.NewForConfigAndClient(cfg, shared); err != nil {
		return Clients{}, fmt.Errorf("coil client: %w", err)
	}
	return c, nil
}

// Connect returns the clients of a program that runs as Config says.
func Connect(kubeconfig, program string) (Clients, error) {
	cfg, err := Config(kubeconfig, program)
	if err != nil {
		return Clients{}, err
	}
	return NewClients(cfg)
}

// newScheme knows the kinds that Core and Discovery read and write, and those that Events are about.
func newScheme() (*runtime.Scheme, error) {
	s := runtime.NewScheme()
	return s, errors.Join(corev1.AddToScheme(s), discoveryv1.AddToScheme(s), v2.Install(s))
}
