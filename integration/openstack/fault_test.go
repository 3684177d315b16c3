package openstack

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"testing"
	"time"

	lab "github.com/coil-net/coil/integration/lab/openstack"
	"github.com/coil-net/coil/pkg/openstack"
	"github.com/coil-net/coil/pkg/testkit"
)

// try has an address made.
func (sc *scene) try(key string, want openstack.Want) error {
	_, err := sc.Ensure(sc.t.Context(), openstack.Address{Key: key}, want)
	return err
}

// quota sets how many objects of a kind the project may have.
func (sc *scene) quota(kind string, n int) {
	sc.t.Helper()
	testkit.Check(sc.t, sc.cloud.Admin().Network(sc.t.Context(), http.MethodPut, "quotas/"+sc.ProjectID, map[string]any{"quota": map[string]any{kind: n}}, nil))
}

// Test16Refused has the cloud refuse an address, and then allow it.
func Test16Refused(t *testing.T) {
	t.Run("quota", func(t *testing.T) {
		sc := newScene(t)
		sc.quota("port", 0)
		refused(t, sc.try("web", all), openstack.QuotaExceeded, "create the port of address web: Quota exceeded for resources: ['port']. (409 OverQuota)")
		sc.quota("port", -1)
		sc.quota("floatingip", 0)
		a, err := sc.Ensure(t.Context(), openstack.Address{Key: "web"}, all)
		refused(t, err, openstack.QuotaExceeded, "create the floating IP of address web: Quota exceeded for resources: ['floatingip'].")
		if a.PortID == "" || len(a.Fixed) != 2 || a.Floating.IsValid() {
			t.Errorf("the address is %+v, want one without floating IP", a)
		}
		sc.quota("floatingip", 1)
		sc.ensure("web", all)
		sc.wants("allowed", "one/web port floating")
	})
	t.Run("no free address", func(t *testing.T) {
		sc := newScene(t)
		subnet := testkit.Must(sc.Create(t.Context(), "network", map[string]any{}))(t)
		subnet = testkit.Must(sc.Create(t.Context(), "subnet", map[string]any{"network_id": subnet, "ip_version": 4, "cidr": "10.2.0.0/30", "gateway_ip": nil}))(t)
		cfg := sc.cfg
		cfg.SubnetIDs = []string{subnet}
		c := sc.cluster(cfg)
		for i := range 3 {
			_, err := c.Ensure(t.Context(), openstack.Address{Key: fmt.Sprint("key-", i)}, openstack.Want{IPv4: true})
			if i < 2 {
				testkit.Check(t, err)
			} else {
				refused(t, err, openstack.AddressesExhausted, "No more IP addresses available")
			}
		}
	})
	t.Run("network of others", func(t *testing.T) {
		sc := newScene(t)
		// A network without a router to it.
		cfg := sc.cfg
		cfg.FloatingNetworkID = testkit.Must(sc.cloud.Admin().Create(t.Context(), "network", map[string]any{"router:external": true}))(t)
		_, err := sc.cluster(cfg).Ensure(t.Context(), openstack.Address{Key: "web"}, all)
		refused(t, err, openstack.BadRequest, "create the floating IP of address web")
		cfg.FloatingNetworkID = sc.NetworkID
		_, err = sc.cluster(cfg).Ensure(t.Context(), openstack.Address{Key: "web"}, all)
		refused(t, err, openstack.BadRequest, "is not a valid external network")
		cfg.SubnetIDs = []string{"00000000-0000-0000-0000-000000000000"}
		_, err = sc.cluster(cfg).List(t.Context())
		refused(t, err, openstack.NotFound, "could not be found. (404 SubnetNotFound)")
		sc.wants("refused", "one/web port")

		// A floating IP of somebody else is on the port.
		a := sc.seen("web")
		testkit.Must(sc.Create(t.Context(), "floatingip", map[string]any{"floating_network_id": sc.cloud.ExternalID(), "port_id": a.PortID, "fixed_ip_address": a.Fixed[0].String()}))(t)
		refused(t, sc.try("web", all), openstack.Conflict, "(409 FloatingIPPortAlreadyAssociated)")
	})
}

// TestShared has a network that is another project's.
func TestShared(t *testing.T) {
	sc := newScene(t)
	network := testkit.Must(sc.cloud.Admin().Create(t.Context(), "network", map[string]any{"shared": true}))(t)
	subnet := testkit.Must(sc.cloud.Admin().Create(t.Context(), "subnet", map[string]any{"network_id": network, "ip_version": 4, "cidr": "10.3.0.0/24"}))(t)
	cfg := sc.cfg
	cfg.SubnetIDs = []string{subnet}
	c := sc.cluster(cfg)
	a := testkit.Must(c.Ensure(t.Context(), openstack.Address{Key: "web"}, openstack.Want{IPv4: true}))(t)
	gateway := testkit.Must(sc.Create(t.Context(), "port", map[string]any{"network_id": network}))(t)
	err := c.EnsurePairs(t.Context(), []string{gateway}, prefixes(a.Fixed...), []openstack.Address{a})
	refused(t, err, openstack.Forbidden, "write the address pairs of gateway port "+gateway)
}

// Test16Login has tokens and credentials end.
func Test16Login(t *testing.T) {
	sc := newScene(t)
	sc.ensure("web", both)

	// A token that was revoked: nobody notices.
	var token string
	sc.front.SetFault(func(c lab.Call) lab.Fault { token = c.Header.Get("X-Auth-Token"); return lab.Fault{} })
	testkit.Must(sc.List(t.Context()))(t)
	sc.front.SetFault(nil)
	sc.front.Calls()
	revoked := *sc.Session
	revoked.Token = token
	testkit.Check(t, revoked.Identity(t.Context(), http.MethodDelete, "auth/tokens", nil, nil, "X-Subject-Token", token))
	testkit.Eventually(t, time.Minute, "the token is refused", func() error {
		testkit.Must(sc.List(t.Context()))(t)
		switch calls := sc.front.Calls(); {
		case len(calls) == 4:
			return errors.New("no login")
		case len(calls) != 6 || !slices.ContainsFunc(calls, func(c lab.Call) bool { return c.String() == "POST auth/tokens" }):
			t.Errorf("the calls are %v, want one login and a repeated call", calls)
		}
		return nil
	})

	// An application credential that expires later: its token has a time that gophercloud can't parse.
	var made struct {
		Credential struct{ ID, Secret string } `json:"application_credential"`
	}
	path := "users/" + sc.UserID + "/application_credentials"
	testkit.Check(t, sc.Identity(t.Context(), http.MethodPost, path, map[string]any{"application_credential": map[string]any{
		"name": "coil", "expires_at": time.Now().Add(time.Hour).UTC().Format("2006-01-02T15:04:05")}}, &made))
	sc.credentials("application_credential_id: "+made.Credential.ID, "application_credential_secret: "+made.Credential.Secret)
	sc.restart()
	testkit.Must(sc.List(t.Context()))(t)

	// The credential is deleted: the token ends with it.
	testkit.Check(t, sc.Identity(t.Context(), http.MethodDelete, path+"/"+made.Credential.ID, nil, nil))
	var err error
	testkit.Eventually(t, time.Minute, "the token is refused", func() error {
		if _, err = sc.List(t.Context()); err == nil {
			return errors.New("no error")
		}
		return nil
	})
	refused(t, err, openstack.AuthFailed, ": log in again: ")
	_, err = sc.List(t.Context())
	refused(t, err, openstack.AuthFailed, "log in at")

	// An admin writes others, and later wrong ones.
	password := []string{"username: " + sc.Name, "project_name: " + sc.Name, "user_domain_id: default", "project_domain_id: default"}
	sc.credentials(append(password, "password: secret")...)
	if l := testkit.Must(sc.List(t.Context()))(t); len(l) != 1 {
		t.Errorf("%+v is listed, want web", l)
	}
	sc.credentials(append(password, "password: wrong")...)
	sc.restart()
	_, err = sc.List(t.Context())
	refused(t, err, openstack.AuthFailed, "log in at")
	sc.credentials("username: "+sc.Name, "password: secret", "user_domain_id: default")
	sc.restart()
	_, err = sc.List(t.Context())
	refused(t, err, openstack.Misconfigured, "")
}

// Test16Down has the cloud busy, broken or away.
func Test16Down(t *testing.T) {
	sc := newScene(t)
	a := sc.ensure("web", both)
	lists := func(c lab.Call) bool { return c.String() == "GET ports" }
	for _, tt := range []struct {
		name  string
		fault lab.Fault
		calls int // at the least
		words string
		after time.Duration
	}{
		{"busy for a minute", lab.Fault{Code: 429, RetryAfter: time.Minute, Body: "slow down"}, 1, "slow down (429)", time.Minute},
		{"busy for long", lab.Fault{Code: 503, Body: "<html>no server is available</html>"}, 4, "no server is available", 0},
		{"broken", lab.Fault{Code: 500, Body: `{"NeutronError": {"type": "HTTPInternalServerError", "message": "Request Failed", "detail": ""}}`}, 1, "Request Failed (500", 0},
		{"down", lab.Fault{Down: true}, 1, "list ports: no answer from 127.0.0.1:", 0},
	} {
		sc.front.SetFault(func(c lab.Call) lab.Fault {
			if lists(c) {
				return tt.fault
			}
			return lab.Fault{}
		})
		sc.calls()
		_, err := sc.List(t.Context())
		e := refused(t, err, openstack.Temporary, tt.words)
		if n := len(sc.calls()); n < tt.calls || n > max(tt.calls, 2) || e.RetryAfter != tt.after {
			t.Errorf("%s: %d calls, retry after %s; want %d and %s", tt.name, n, e.RetryAfter, tt.calls, tt.after)
		}
		// What needs no call goes on.
		testkit.Must(sc.Ensure(t.Context(), a, both))(t)
	}

	// Busy for a moment: nobody notices.
	busy := 2
	sc.front.SetFault(func(c lab.Call) lab.Fault {
		if busy--; busy >= 0 {
			return lab.Fault{Code: []int{503, 429}[busy], RetryAfter: time.Second}
		}
		return lab.Fault{}
	})
	testkit.Must(sc.List(t.Context()))(t)

	// A POST isn't made twice.
	sc.front.SetFault(func(c lab.Call) lab.Fault {
		if c.Method == http.MethodPost {
			return lab.Fault{Code: 503}
		}
		return lab.Fault{}
	})
	sc.calls()
	refused(t, sc.try("new", both), openstack.Temporary, "create the port of address new: the answer has no text (503)")
	if n := len(sc.calls()); n != 5 {
		t.Errorf("%d calls, want 5", n)
	}

	// No answer comes; the caller gives up.
	sc.front.SetFault(func(lab.Call) lab.Fault { return lab.Fault{Latency: time.Hour} })
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := sc.List(ctx)
	refused(t, err, openstack.Temporary, context.DeadlineExceeded.Error())
	sc.front.SetFault(nil)
	testkit.Must(sc.List(t.Context()))(t)
}
