package servers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/atomicfile"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/reconcile"
)

const (
	// service is the name of the Service of the API servers, in namespace default.
	service = "kubernetes"
	// port is the name of its port.
	port = "https"
	// most is how many addresses are remembered.
	most = 16
)

// saved is the content of the file.
type saved struct {
	Servers []netip.AddrPort `json:"servers"`
}

// Run follows the EndpointSlices of the Service kubernetes, and remembers the addresses of API servers, until ctx ends.
func (s *Servers) Run(ctx context.Context, discovery rest.Interface) error {
	informer := kube.EndpointSliceInformer(discovery, metav1.NamespaceDefault, discoveryv1.LabelServiceName+"="+service)
	all := kube.CacheOf[discoveryv1.EndpointSlice](informer)
	loop := reconcile.New("api-servers", func(ctx context.Context, _ struct{}) error { return s.learn(ctx, all.All()) }, nil)
	synced, err := reconcile.Register(reconcile.On(informer, reconcile.Handler(func(*discoveryv1.EndpointSlice) { loop.Add(struct{}{}) })))
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	defer informer.Shutdown()
	defer stop()
	informer.Start(ctx.Done())
	return loop.Run(ctx, 1, synced...)
}

// learn takes the addresses of API servers, and saves them. If there are none, those of before stay: an API server has just said so.
func (s *Servers) learn(ctx context.Context, all []*discoveryv1.EndpointSlice) error {
	addrs := addresses(all)
	if len(addrs) == 0 {
		return nil
	}
	if s.set(addrs) {
		klog.FromContext(ctx).V(2).Info("The API servers have other addresses", "addresses", addrs)
	}
	if slices.Equal(s.saved, addrs) {
		return nil
	}
	text, err := json.Marshal(saved{addrs})
	if err == nil {
		err = atomicfile.Write(s.file, append(text, '\n'), 0o600)
	}
	if err != nil {
		return fmt.Errorf("remember the addresses of API servers: %w", err)
	}
	s.saved = addrs
	return nil
}

// load takes the addresses of the file. It is written anew if it can't be read.
func (s *Servers) load(ctx context.Context) {
	if err := atomicfile.RemoveStale(s.file, time.Minute); err != nil {
		klog.FromContext(ctx).Error(err, "Temporary files stay")
	}
	text, err := os.ReadFile(s.file)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	var f saved
	if err == nil {
		err = json.Unmarshal(text, &f)
	}
	if err == nil && (len(f.Servers) == 0 || len(f.Servers) > most || slices.ContainsFunc(f.Servers, func(a netip.AddrPort) bool { return !usable(a) })) {
		err = errors.New("it doesn't have addresses with ports")
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "The file of the API servers' addresses is ignored, and will be written anew", "file", s.file)
		return
	}
	s.saved = f.Servers
	s.set(f.Servers)
}

// usable says whether an address can be dialed.
func usable(a netip.AddrPort) bool { return a.IsValid() && a.Port() != 0 && !a.Addr().IsUnspecified() }

// addresses returns those of the ready endpoints, sorted.
func addresses(all []*discoveryv1.EndpointSlice) (addrs []netip.AddrPort) {
	for _, s := range all {
		for _, p := range s.Ports {
			if p.Port == nil || *p.Port < 1 || *p.Port > 65535 || p.Name == nil || *p.Name != port || p.Protocol != nil && *p.Protocol != corev1.ProtocolTCP {
				continue
			}
			for _, e := range s.Endpoints {
				if e.Conditions.Ready != nil && !*e.Conditions.Ready {
					continue
				}
				for _, text := range e.Addresses {
					if a, err := netip.ParseAddr(text); err == nil && usable(netip.AddrPortFrom(a, uint16(*p.Port))) {
						addrs = append(addrs, netip.AddrPortFrom(a, uint16(*p.Port)))
					}
				}
			}
		}
	}
	slices.SortFunc(addrs, netip.AddrPort.Compare)
	addrs = slices.Compact(addrs)
	return addrs[:min(len(addrs), most)]
}
