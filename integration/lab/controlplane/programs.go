package controlplane

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/coil-net/coil/integration/lab/pki"
)

// Names of the programs.
const (
	Etcd              = "etcd"
	APIServer         = "kube-apiserver"
	ControllerManager = "kube-controller-manager"
	Scheduler         = "kube-scheduler"
	Kubectl           = "kubectl"
)

// Base names of the certificates and kubeconfigs in the directory that Config.Issue fills.
const (
	servingCert       = "apiserver"
	kubeletClientCert = "apiserver-kubelet-client"
	controllerConfig  = "kube-controller-manager.kubeconfig"
	schedulerConfig   = "kube-scheduler.kubeconfig"
)

// Config is where one control plane lives.
type Config struct {
	Dir       string // certificates, keys and etcd's data
	Etcd      netip.AddrPort
	EtcdPeer  netip.AddrPort
	Bind      netip.AddrPort // of the API server
	Advertise netip.Addr     // invalid: the service "kubernetes" has no endpoints
	// ServiceCIDRs are one range of each family, the primary one first.
	ServiceCIDRs []netip.Prefix
}

// Validate reports everything that keeps the control plane from starting.
func (c Config) Validate() error {
	var errs []error
	if c.Dir == "" {
		errs = append(errs, errors.New("no directory"))
	}
	for name, a := range map[string]netip.AddrPort{"etcd": c.Etcd, "etcd peer": c.EtcdPeer, "API server": c.Bind} {
		if !a.IsValid() || a.Port() == 0 {
			errs = append(errs, fmt.Errorf("no address and port of %s", name))
		}
	}
	if n := len(c.ServiceCIDRs); n != 1 && n != 2 {
		errs = append(errs, fmt.Errorf("%d service ranges, want one of each family", n))
	}
	return errors.Join(errs...)
}

// URL is where clients beside the API server reach it.
func (c Config) URL() string { return "https://" + c.Bind.String() }

func (c Config) path(name string) string { return filepath.Join(c.Dir, name) }

// Issue makes the certificates and kubeconfigs that the programs need.
func (c Config) Issue(ca *pki.Authority) error {
	serving := pki.Subject{
		User:     "kube-apiserver",
		DNSNames: []string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"},
		Addrs:    []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback(), c.Bind.Addr()},
	}
	if c.Advertise.IsValid() {
		serving.Addrs = append(serving.Addrs, c.Advertise)
	}
	for _, p := range c.ServiceCIDRs {
		serving.Addrs = append(serving.Addrs, p.Addr().Next()) // the service "kubernetes"
	}
	kubelet := pki.Subject{User: "kube-apiserver-kubelet-client", Groups: []string{"system:masters"}}
	return errors.Join(
		ca.WriteCert(c.Dir, servingCert, serving),
		ca.WriteCert(c.Dir, kubeletClientCert, kubelet),
		ca.WriteKubeconfig(c.path(controllerConfig), c.URL(), "lab", pki.Subject{User: "system:kube-controller-manager"}),
		ca.WriteKubeconfig(c.path(schedulerConfig), c.URL(), "lab", pki.Subject{User: "system:kube-scheduler"}),
	)
}

// EtcdArgs are the flags of etcd. Nothing is synced to disk: no lab outlives its machine.
func (c Config) EtcdArgs() []string {
	client, peer := "http://"+c.Etcd.String(), "http://"+c.EtcdPeer.String()
	return []string{
		"--name=lab",
		"--data-dir=" + c.path("etcd"),
		"--unsafe-no-fsync",
		"--listen-client-urls=" + client,
		"--advertise-client-urls=" + client,
		"--listen-peer-urls=" + peer,
		"--initial-advertise-peer-urls=" + peer,
		"--initial-cluster=lab=" + peer,
		"--quota-backend-bytes=4294967296",
		"--log-level=warn",
	}
}

// APIServerArgs are the flags of kube-apiserver; extra ones win over them.
func (c Config) APIServerArgs(extra ...string) []string {
	args := []string{
		"--etcd-servers=http://" + c.Etcd.String(),
		"--bind-address=" + c.Bind.Addr().String(),
		fmt.Sprintf("--secure-port=%d", c.Bind.Port()),
		"--cert-dir=" + c.Dir,
		"--tls-cert-file=" + c.path(servingCert+".crt"),
		"--tls-private-key-file=" + c.path(servingCert+".key"),
		"--client-ca-file=" + c.path(pki.CACertFile),
		"--kubelet-client-certificate=" + c.path(kubeletClientCert+".crt"),
		"--kubelet-client-key=" + c.path(kubeletClientCert+".key"),
		// The names of nodes resolve nowhere.
		"--kubelet-preferred-address-types=InternalIP",
		"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file=" + c.path(pki.ServiceAccountFile),
		"--service-account-signing-key-file=" + c.path(pki.ServiceAccountFile),
		"--service-cluster-ip-range=" + joinPrefixes(c.ServiceCIDRs),
		"--authorization-mode=Node,RBAC",
		"--enable-admission-plugins=NodeRestriction",
		"--allow-privileged=true",
	}
	if c.Advertise.IsValid() {
		args = append(args, "--advertise-address="+c.Advertise.String())
	} else {
		// A loopback address can't be an endpoint.
		args = append(args, "--endpoint-reconciler-type=none")
	}
	return append(args, extra...)
}

// selectEgress writes the file that has kube-apiserver reach the cluster by a proxy, and returns its path
// (https://kubernetes.io/docs/reference/config-api/apiserver-config.v1beta1/, EgressSelectorConfiguration).
func (c Config) selectEgress(proxy string) (file string, err error) {
	file = c.path("egress-selector.yaml")
	return file, os.WriteFile(file, fmt.Appendf(nil, `apiVersion: apiserver.k8s.io/v1beta1
kind: EgressSelectorConfiguration
egressSelections:
- name: cluster
  connection: {proxyProtocol: HTTPConnect, transport: {uds: {udsName: %q}}}
`, proxy), 0o600)
}

// ControllerManagerArgs are the flags of kube-controller-manager. Pod addresses are the CNI
// plugin's business: no node is given a pod CIDR.
func (c Config) ControllerManagerArgs(extra ...string) []string {
	return append([]string{
		"--kubeconfig=" + c.path(controllerConfig),
		"--authentication-kubeconfig=" + c.path(controllerConfig),
		"--authorization-kubeconfig=" + c.path(controllerConfig),
		"--root-ca-file=" + c.path(pki.CACertFile),
		"--service-account-private-key-file=" + c.path(pki.ServiceAccountFile),
		// It signs CertificateSigningRequests that are approved, such as those of gateways.
		"--cluster-signing-cert-file=" + c.path(pki.CACertFile),
		"--cluster-signing-key-file=" + c.path(pki.CAKeyFile),
		"--service-cluster-ip-range=" + joinPrefixes(c.ServiceCIDRs),
		"--use-service-account-credentials",
		"--allocate-node-cidrs=false",
		"--bind-address=127.0.0.1",
		"--cert-dir=" + c.Dir,
		// The default is below /usr, and is made when it isn't there.
		"--flex-volume-plugin-dir=" + c.path("volume-plugins"),
		"--leader-elect=false",
	}, extra...)
}

// SchedulerArgs are the flags of kube-scheduler.
func (c Config) SchedulerArgs() []string {
	return []string{
		"--kubeconfig=" + c.path(schedulerConfig),
		"--authentication-kubeconfig=" + c.path(schedulerConfig),
		"--authorization-kubeconfig=" + c.path(schedulerConfig),
		"--bind-address=127.0.0.1",
		"--cert-dir=" + c.Dir,
		"--leader-elect=false",
	}
}

func joinPrefixes(prefixes []netip.Prefix) string {
	s := make([]string, len(prefixes))
	for i, p := range prefixes {
		s[i] = p.String()
	}
	return strings.Join(s, ",")
}
