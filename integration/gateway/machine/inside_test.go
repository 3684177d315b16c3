package machine

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/coil-net/coil/generated/clientset/versioned"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/testkit"
)

const (
	linkAddr6 = "fd00:2::15"
	// apiAway has the machine start without a way to the API server.
	apiAway = "/run/api-away"
	// firstRules is the table as it was when the machine had its first address after the power cut.
	firstRules = "/run/first-rules"
	within     = 20 * time.Second

	// prepare makes a fresh Debian of the host's files, which has the host's packages and nothing of its configuration, with
	// a link. Files of /tmp, of which the test is one, stay.
	prepare = `
		rm -rf /etc/systemd /etc/rc?.d /etc/init.d /etc/keepalived /etc/coil /etc/nftables.conf /etc/fstab /etc/default/keepalived /etc/default/coil-lb-agent \
			/var/lib/coil-lb-agent /usr/local/bin/coil-lb-agent /var/log/journal
		mkdir -p /etc/systemd/system/multi-user.target.wants /etc/systemd/system/network-online.target.wants /etc/keepalived /etc/coil /etc/tmpfiles.d
		touch /etc/fstab
		echo 0123456789abcdef0123456789abcdef >/etc/machine-id
		ln -sf /dev/null /etc/tmpfiles.d/tmp.conf
		cat >/etc/systemd/system/link.service <<-EOF
			[Unit]
			Description=The link of the machine
			Before=network-online.target
			[Service]
			Type=oneshot
			RemainAfterExit=yes
			ExecStart=modprobe virtio_net
			ExecStart=ip link set eth0 up
			ExecStart=ip address add 10.0.2.15/24 dev eth0
			ExecStart=ip address add fd00:2::15/64 dev eth0 nodad
			ExecStart=sh -c 'test ! -e ` + apiAway + ` || ip route add unreachable 10.0.2.2'
		EOF
		cat >/etc/systemd/system/watch.service <<-EOF
			[Unit]
			Description=Notes the rules of the machine when it has the first address of Services
			Before=coil-lb-agent.service keepalived.service
			ConditionPathExists=` + apiAway + `
			[Service]
			Type=exec
			ExecStart=sh -c 'ip -o monitor address dev eth0 | while read -r line; do case \$\$line in */32*) nft list table inet coil_lb >` + firstRules + ` 2>&1; exit;; esac; done'
		EOF
		ln -s ../watch.service /etc/systemd/system/multi-user.target.wants/
		ln -s ../link.service /etc/systemd/system/multi-user.target.wants/
		ln -s ../link.service /etc/systemd/system/network-online.target.wants/
		sync`
	becomeSystemd = `
		exec /lib/systemd/systemd --unit=multi-user.target`
)

// gateway is the machine, as its admin sees it.
type gateway struct {
	*testing.T
	core kubernetes.Interface
	coil versioned.Interface
}

// newGateway waits until systemd has booted the machine.
func newGateway(t *testing.T) *gateway {
	t.Helper()
	cfg := testkit.Must(clientcmd.BuildConfigFromFlags("", filepath.Join(os.Getenv(filesEnv), adminFile)))(t)
	g := &gateway{T: t, core: kubernetes.NewForConfigOrDie(cfg), coil: versioned.NewForConfigOrDie(cfg)}
	t.Cleanup(func() {
		if t.Failed() {
			// Not the test's context, which has ended.
			out, err := sh(context.Background(), `systemctl --failed --no-pager; journalctl -b --no-pager -o short-monotonic -u coil-lb-agent -u keepalived -u link | grep -v " data for process" | tail -n 80
				ip address; nft list tables; cat /etc/keepalived/keepalived.conf /etc/keepalived/coil/*; true`)
			t.Logf("the machine at the end: %v\n%s", err, out)
		}
	})
	g.eventually("systemd has booted", func() error {
		if pid1 := testkit.Must(os.ReadFile("/proc/1/comm"))(t); string(pid1) != "systemd\n" {
			return fmt.Errorf("PID 1 is %s", pid1)
		}
		// The command fails if any unit has failed. The units that count are looked at below.
		out, err := exec.CommandContext(t.Context(), "systemctl", "is-system-running").CombinedOutput()
		if state := strings.TrimSpace(string(out)); state != "running" && state != "degraded" {
			return fmt.Errorf("%s: %w", state, err)
		}
		return nil
	})
	t.Logf("units that failed: %s", g.sh("systemctl --failed --plain --no-legend --no-pager"))
	return g
}

func (g *gateway) sh(script string) string {
	g.Helper()
	return testkit.Must(sh(g.Context(), script))(g.T)
}

func (g *gateway) eventually(what string, cond func() error) {
	g.Helper()
	testkit.Eventually(g.T, within, what, cond)
}

// service makes a Service of both families, and returns its addresses as soon as it tells them.
func (g *gateway) service(name string) []string {
	g.Helper()
	g.create(name)
	return g.addresses(name)
}

// create makes a Service of both families.
func (g *gateway) create(name string) {
	g.Helper()
	testkit.Must(g.core.CoreV1().Services(namespace).Create(g.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{loadbalancer.AnnotationSharing: loadbalancer.SharingNone}},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, LoadBalancerClass: new(loadbalancer.Class), AllocateLoadBalancerNodePorts: new(false),
			IPFamilyPolicy: new(corev1.IPFamilyPolicyRequireDualStack), Ports: []corev1.ServicePort{{Port: 80}},
		},
	}, metav1.CreateOptions{}))(g.T)
}

// addresses returns the addresses of a Service as soon as it tells them.
func (g *gateway) addresses(name string) (all []string) {
	g.Helper()
	g.eventually("Service "+name+" tells its addresses", func() error {
		s, err := g.core.CoreV1().Services(namespace).Get(g.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if all = addressesOf(s); len(all) != 2 {
			return fmt.Errorf("%+v", s.Status)
		}
		return nil
	})
	return all
}

// has waits until addresses are at the link, and the table knows them.
func (g *gateway) has(when string, addresses []string) {
	g.Helper()
	g.eventually(when+", addresses are at the link and in the table", func() error {
		return errors.Join(g.lacks("ip -o address show dev eth0", addresses), g.lacks("nft list table inet coil_lb", addresses))
	})
}

// lacks returns an error unless the output of a command has all of some addresses.
func (g *gateway) lacks(command string, addresses []string) error {
	out, err := sh(g.Context(), command)
	if err != nil {
		return err
	}
	for _, a := range addresses {
		if !says(out, a) {
			return fmt.Errorf("%s: no %s:\n%s", command, a, out)
		}
	}
	return nil
}

// says tells whether a text has an address, and not only as a part of another one.
func says(text, address string) bool {
	return regexp.MustCompile(`(^|[^0-9a-f:.])` + regexp.QuoteMeta(address) + `([^0-9a-f:.]|$)`).MatchString(text)
}

// property is a property of the unit coil-lb-agent.service.
func (g *gateway) property(name string) string {
	g.Helper()
	return strings.TrimSpace(g.sh("systemctl show --value -p " + name + " coil-lb-agent"))
}

// ready waits until the agent has done what the API server says.
func (g *gateway) ready(when string) {
	g.Helper()
	g.eventually(when+", the agent is ready", func() error {
		if _, err := sh(g.Context(), "systemctl is-active coil-lb-agent"); err != nil {
			return err
		}
		answer, err := http.Get("http://127.0.0.1:9401/readyz")
		if err != nil {
			return err
		}
		answer.Body.Close()
		if answer.StatusCode != http.StatusOK {
			return errors.New(answer.Status)
		}
		return nil
	})
}

// applied waits until the LoadBalancerGateway says that the machine serves all Services, and is the master of all instances.
func (g *gateway) applied(when string) {
	g.Helper()
	g.eventually(when+", the status says that all is served", func() error {
		o, err := g.coil.CoilV2().LoadBalancerGateways().Get(g.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		masters := 0
		for _, s := range o.Status.VRRP {
			if s.State == "MASTER" {
				masters++
			}
		}
		if len(o.Status.Conditions) == 0 || o.Status.Conditions[0].Reason != v2.ReasonAllServed || masters != 4 {
			return fmt.Errorf("%+v", o.Status)
		}
		return nil
	})
}

// monitor notes what a program tells about the kernel, between two marks that it tells, too.
type monitor struct {
	args []string
	// set is the command that makes a mark with a number, unset the one that removes it, and mark the text that the program tells of it.
	set, unset, mark string

	testkit.Buffer
}

// during runs a function, and returns what was told meanwhile.
func (m *monitor) during(g *gateway, f func()) string {
	g.Helper()
	ctx, cancel := context.WithCancel(g.Context())
	cmd := exec.CommandContext(ctx, m.args[0], m.args[1:]...)
	cmd.Stdout, cmd.Stderr = m, m
	testkit.Check(g.T, cmd.Start())
	defer func() { cancel(); _ = cmd.Wait() }() // it was killed
	mark := func(n int) {
		g.Helper()
		set, unset, mark := fmt.Sprintf(m.set, n), fmt.Sprintf(m.unset, n), fmt.Sprintf(m.mark, n)
		g.eventually(m.args[0]+" tells of a mark", func() error {
			_, err := sh(ctx, set)
			if err == nil && !strings.Contains(m.String(), mark) {
				err = fmt.Errorf("no %q in %s", mark, m.String())
			}
			// Before it listens it misses marks: each one is made anew.
			_, e := sh(ctx, unset)
			return errors.Join(err, e)
		})
	}
	mark(8)
	f()
	mark(9)
	return m.String()
}

// keeps runs a function, during which neither an address goes from the link nor the table from the kernel.
func (g *gateway) keeps(what string, addresses []string, f func()) {
	g.Helper()
	links := &monitor{
		args: []string{"ip", "-o", "monitor", "address"}, set: "ip address add 127.0.0.%d/32 dev lo", unset: "ip address del 127.0.0.%d/32 dev lo", mark: "127.0.0.%d/32",
	}
	tables := &monitor{
		args: []string{"nft", "monitor"}, set: "nft add table inet marker%d", unset: "nft delete table inet marker%d", mark: "add table inet marker%d",
	}
	var said string
	told := links.during(g, func() { said = tables.during(g, f) })
	for _, a := range addresses {
		for line := range strings.Lines(told) {
			if strings.Contains(line, "Deleted") && says(line, a) {
				g.Errorf("%s: an address went: %s", what, line)
			}
		}
	}
	if strings.Contains(said, "delete table inet coil_lb") {
		g.Errorf("%s: the table went:\n%s", what, said)
	}
	g.has(what, addresses)
}

// testInstalled installs the machine as the page says, and treats its units as an admin does.
func testInstalled(t *testing.T) {
	g, files := newGateway(t), os.Getenv(filesEnv)
	script := func(name string) string { return string(testkit.Must(os.ReadFile(filepath.Join(files, name)))(t)) }
	g.sh("cd " + files + "; umask 077; cp lb-agent.kubeconfig lb-agent.crt lb-agent.key /etc/coil/")
	g.sh("cd " + files + "\n" + script(installFile))
	if out := g.sh("systemd-analyze verify --man=no coil-lb-agent.service"); out != "" {
		t.Errorf("systemd-analyze verify: %s", out)
	}
	t.Logf("systemd-analyze security: %s", g.sh("systemd-analyze security --no-pager coil-lb-agent.service | tail -n 1"))
	g.ready("before keepalived")
	g.create("one")
	g.eventually("a Service says that keepalived isn't set up", func() error {
		s, err := g.core.CoreV1().Services(namespace).Get(g.Context(), "one", metav1.GetOptions{})
		if err != nil {
			return err
		}
		served := meta.FindStatusCondition(s.Status.Conditions, loadbalancer.ConditionServed)
		if served == nil || served.Reason != loadbalancer.ReasonRefused || !strings.Contains(served.Message, "keepalived.conf doesn't include") {
			return fmt.Errorf("%+v", s.Status)
		}
		return nil
	})
	g.sh(script(keepalivedFile))
	// What an admin has installed is on the disk by the time that power is cut; the programs look after their own files.
	g.sh("sync")
	addresses := g.addresses("one")
	g.has("at first", addresses)
	g.applied("at first")
	g.confined()

	// Another Service has keepalived read its configuration again.
	pid := g.sh("systemctl show --value -p MainPID keepalived")
	g.keeps("another Service", addresses, func() {
		addresses = append(addresses, g.service("two")...)
		g.has("another Service", addresses)
	})
	if now := g.sh("systemctl show --value -p MainPID keepalived"); now != pid {
		t.Errorf("keepalived is process %s, was %s", now, pid)
	}

	agent := g.property("MainPID")
	g.keeps("restart", addresses, func() { g.sh("systemctl restart coil-lb-agent"); g.ready("restart") })
	restarted := g.property("MainPID")
	if restarted == agent {
		t.Error("restart: the agent is the same process")
	}
	g.keeps("SIGKILL", addresses, func() {
		g.sh("systemctl kill -s KILL coil-lb-agent")
		g.eventually("it is started again", func() error {
			if pid := g.property("MainPID"); pid == restarted || pid == "0" {
				return fmt.Errorf("it is process %s", pid)
			}
			return nil
		})
		g.ready("SIGKILL")
	})
	if n := g.property("NRestarts"); n != "1" {
		t.Errorf("systemd has started it again %s times, want once", n)
	}
	g.keeps("stop", addresses, func() {
		g.sh("systemctl stop coil-lb-agent")
		if state := g.property("ActiveState") + " " + g.property("Result"); state != "inactive success" {
			t.Errorf("stopped, it is %s", state)
		}
	})
	g.sh("systemctl restart keepalived")
	g.has("keepalived restarts without the agent", addresses)
	g.sh("systemctl start coil-lb-agent")
	g.ready("start")
	g.applied("start")
	g.eventually("the last state is saved", func() error {
		return g.lacks("cat /var/lib/coil-lb-agent/last.json", addresses)
	})
}

// confined wants that the agent has the rights of its unit, and no others.
func (g *gateway) confined() {
	g.Helper()
	pid := g.property("MainPID")
	status := g.sh("cat /proc/" + pid + "/status")
	// Of the capabilities 12 is NET_ADMIN, 19 SYS_PTRACE and 21 SYS_ADMIN.
	const capabilities = "0000000000281000"
	for _, want := range []string{"CapPrm:\t" + capabilities, "CapEff:\t" + capabilities, "CapBnd:\t" + capabilities, "NoNewPrivs:\t1", "Seccomp:\t2"} {
		if !strings.Contains(status, want+"\n") {
			g.Errorf("its status has no %q:\n%s", want, status)
		}
	}
	for path, writable := range map[string]bool{"/usr": false, "/etc": false, "/etc/keepalived": false, "/etc/keepalived/coil": true, "/var/lib": false, "/var/lib/coil-lb-agent": true, "/tmp": true} {
		_, err := sh(g.Context(), "nsenter --mount --target="+pid+" sh -ec 'touch "+path+"/.written; rm "+path+"/.written'")
		if (err == nil) != writable {
			g.Errorf("%s is writable: %t (%v)", path, err == nil, err)
		}
	}
	for _, key := range []string{"net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"} {
		if v := strings.TrimSpace(g.sh("sysctl -n " + key)); v != "1" {
			g.Errorf("%s is %s", key, v)
		}
	}
}

// testPowerCut boots the machine again, first without a way to the API server.
func testPowerCut(t *testing.T) {
	g := newGateway(t)
	addresses := strings.Split(os.Getenv(addressesEnv), ",")
	if len(addresses) != 4 || slices.Contains(addresses, "") {
		t.Fatalf("addresses are %q", addresses)
	}
	g.has("without the API server", addresses)
	g.eventually("rules are there before addresses", func() error { return g.lacks("cat "+firstRules, addresses) })
	t.Logf("the boot: %s", g.sh("journalctl -b --no-pager -o short-monotonic -u coil-lb-agent -u keepalived -u watch | grep -v ' data for process' | head -n 60"))
	server := testkit.Must(clientcmd.BuildConfigFromFlags("", filepath.Join(os.Getenv(filesEnv), adminFile)))(t).Host
	if c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(server, "https://")); err == nil {
		c.Close()
		t.Error("the API server is reached")
	}
	for _, unit := range []string{"coil-lb-agent", "keepalived"} {
		if state := strings.TrimSpace(g.sh("systemctl is-active " + unit)); state != "active" {
			t.Errorf("%s is %s", unit, state)
		}
	}
	g.keeps("the API server comes back", addresses, func() {
		g.sh("ip route del unreachable 10.0.2.2")
		g.ready("the API server comes back")
		addresses = append(addresses, g.service("three")...)
		g.has("the API server comes back", addresses)
	})
}
