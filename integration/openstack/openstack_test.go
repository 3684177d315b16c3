// Package openstack tests addresses in a cloud (pkg/openstack) with a real Keystone and a real Neutron. Numbers in the names of tests
// are those of the scenarios that a load balancer for OpenStack must pass.
//
// Two clouds serve all tests, each of which has a project and a proxy of its own.
package openstack

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	lab "github.com/coil-net/coil/integration/lab/openstack"
	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/integration/rig/rigtest"
	"github.com/coil-net/coil/pkg/openstack"
	"github.com/coil-net/coil/pkg/testkit"
)

// clouds are those of all tests. A Neutron uses one processor.
var clouds [2]struct {
	sync.Once
	*lab.Cloud
	err   error
	users atomic.Int64 // tests that run
}

// shared is the cluster of the tests of Services.
var shared = rigtest.Shared{Options: rig.Options{Tags: []string{"faultpoints"}}, End: stopClouds}

func TestMain(m *testing.M) { shared.Main(m) }

func stopClouds() (err error) {
	for i := range clouds {
		if c := clouds[i].Cloud; c != nil {
			err = errors.Join(err, c.Stop())
		}
	}
	return err
}

// take returns the cloud that fewest tests use.
func take(t *testing.T) *lab.Cloud {
	t.Helper()
	c := &clouds[0]
	for i := range clouds {
		if clouds[i].users.Load() < c.users.Load() {
			c = &clouds[i]
		}
	}
	c.users.Add(1)
	t.Cleanup(func() { c.users.Add(-1) })
	c.Do(func() { c.Cloud, c.err = lab.Start(context.Background(), lab.Options{Log: os.Stderr}) })
	testkit.Check(t, c.err)
	return c.Cloud
}

// scene is a project, and a cluster that has addresses in it.
type scene struct {
	*lab.Project
	t     *testing.T
	cloud *lab.Cloud
	front *lab.Front
	cfg   openstack.Config
	*openstack.Client
}

// newScene makes a project. The test runs with others at the same time.
func newScene(t *testing.T) *scene {
	t.Helper()
	testkit.Need(t, testkit.APIServer)
	t.Parallel()
	return newProject(t)
}

// newProject makes a project.
func newProject(t *testing.T) *scene {
	t.Helper()
	cloud := take(t)
	sc := &scene{t: t, cloud: cloud, Project: testkit.Must(cloud.NewProject(t.Context()))(t), front: testkit.Must(cloud.NewFront())(t)}
	t.Cleanup(sc.front.Close)
	sc.cfg = openstack.Config{
		CloudsFile: filepath.Join(t.TempDir(), "clouds.yaml"), Cloud: "lab", ClusterID: "one",
		SubnetIDs: []string{sc.Subnet4, sc.Subnet6}, FloatingNetworkID: cloud.ExternalID(), Grace: 1, // ns: all are older
	}
	sc.credentials("username: "+sc.Name, "password: secret", "project_name: "+sc.Name, "user_domain_id: default", "project_domain_id: default")
	sc.restart()
	return sc
}

// credentials writes clouds.yaml.
func (sc *scene) credentials(auth ...string) {
	sc.t.Helper()
	text := "clouds:\n  lab:\n    region_name: RegionOne\n    auth:\n      auth_url: " + sc.front.URL() + "/v3\n"
	if slices.ContainsFunc(auth, func(line string) bool { return strings.HasPrefix(line, "application_credential") }) {
		text = strings.Replace(text, "    auth:\n", "    auth_type: v3applicationcredential\n    auth:\n", 1)
	}
	for _, line := range auth {
		text += "      " + line + "\n"
	}
	testkit.Check(sc.t, os.WriteFile(sc.cfg.CloudsFile, []byte(text), 0o600))
}

// restart makes a new client, as a program does that starts again.
func (sc *scene) restart() { sc.Client = sc.cluster(sc.cfg) }

// cluster returns a client with another configuration.
func (sc *scene) cluster(cfg openstack.Config) *openstack.Client {
	sc.t.Helper()
	return testkit.Must(openstack.New(cfg))(sc.t)
}

// both and all are what tests want.
var (
	both = openstack.Want{IPv4: true, IPv6: true}
	all  = openstack.Want{IPv4: true, IPv6: true, Floating: true}
)

// ensure has an address made of which only the key is known.
func (sc *scene) ensure(key string, want openstack.Want) openstack.Address {
	sc.t.Helper()
	return testkit.Must(sc.Ensure(sc.t.Context(), openstack.Address{Key: key}, want))(sc.t)
}

// seen is what List says of an address.
func (sc *scene) seen(key string) openstack.Address {
	sc.t.Helper()
	for _, a := range testkit.Must(sc.List(sc.t.Context()))(sc.t) {
		if a.Key == key {
			return a
		}
	}
	return openstack.Address{Key: key}
}

// calls are those since the last time but the login and what comes with it.
func (sc *scene) calls() (all []string) {
	for _, c := range sc.front.Calls() {
		if c.Path != "auth/tokens" && !strings.HasPrefix(c.Path, "subnets/") && c.Path != "/" {
			all = append(all, c.String())
		}
	}
	return all
}

// object is a port or a floating IP, as the test sees it, past the package.
type object struct {
	ID, Description, Name string
	Tags                  []string
	DeviceOwner           string `json:"device_owner"`
	FixedIPs              []struct {
		IP     string `json:"ip_address"`
		Subnet string `json:"subnet_id"`
	} `json:"fixed_ips"`
	Pairs []struct {
		IP  string `json:"ip_address"`
		MAC string `json:"mac_address"`
	} `json:"allowed_address_pairs"`
	MAC       string `json:"mac_address"`
	Floating  string `json:"floating_ip_address"`
	PortID    string `json:"port_id"`
	FixedIP   string `json:"fixed_ip_address"`
	Revision  int    `json:"revision_number"`
	CreatedAt string `json:"created_at"`
}

// raw lists all of a kind in the project, with a filter.
func (sc *scene) raw(kind, filter string) (all []object) {
	sc.t.Helper()
	for marker := ""; ; {
		var page map[string]json.RawMessage
		path := kind + "?project_id=" + sc.ProjectID + "&" + filter + marker
		err := sc.Network(sc.t.Context(), http.MethodGet, path, nil, &page)
		if err != nil && marker != "" && strings.Contains(err.Error(), "could not be found") {
			all, marker = nil, "" // the last one of the page before was deleted meanwhile
			continue
		}
		testkit.Check(sc.t, err)
		var got []object
		testkit.Check(sc.t, json.Unmarshal(page[kind], &got))
		all = append(all, got...)
		if len(got) == 0 || page[kind+"_links"] == nil {
			return all
		}
		marker = "&marker=" + got[len(got)-1].ID
	}
}

// inventory says what addresses there are, as "cluster/key port floating", sorted. An object whose marks differ is told with both. Objects
// with the tag "foreign" are named by it and their ID.
func (sc *scene) inventory() (all []string) {
	sc.t.Helper()
	ports := map[string]string{}
	line := map[string]string{}
	for _, p := range sc.raw("ports", "network_id="+sc.NetworkID) {
		if p.DeviceOwner == "" {
			ports[p.ID] = owner(p)
			line[p.ID] = ports[p.ID] + " port"
		}
	}
	for _, f := range sc.raw("floatingips", "") {
		of := owner(f)
		if f.PortID == "" || ports[f.PortID] != of {
			all = append(all, of+" floating alone")
			continue
		}
		line[f.PortID] += " floating"
	}
	for _, l := range line {
		all = append(all, l)
	}
	slices.Sort(all)
	return all
}

// owner is the cluster and the key that the tags of an object say, with the description if that says something else; it is empty for one that isn't of any.
func owner(o object) string {
	if slices.Contains(o.Tags, "foreign") {
		return "foreign " + o.ID
	}
	var cluster, key string
	for _, tag := range o.Tags {
		if v, ok := strings.CutPrefix(tag, "coil-cluster="); ok {
			cluster = v
		}
		if v, ok := strings.CutPrefix(tag, "coil-address="); ok {
			key = v
		}
	}
	owner := cluster + "/" + key
	if want := "Coil: cluster " + cluster + ", address " + key; o.Description != want && strings.HasPrefix(o.Description, "Coil:") {
		owner += " described as " + o.Description
	}
	return owner
}

// wants compares the inventory.
func (sc *scene) wants(when string, want ...string) {
	sc.t.Helper()
	slices.Sort(want)
	if got := sc.inventory(); !slices.Equal(got, want) {
		sc.t.Errorf("%s: the project has\n  %s\nwant\n  %s", when, strings.Join(got, "\n  "), strings.Join(want, "\n  "))
	}
}

// refused wants an error with a reason, and words of the cloud in it.
func refused(t *testing.T, err error, reason openstack.Reason, words string) *openstack.Error {
	t.Helper()
	e := new(openstack.Error)
	if !errors.As(err, &e) || e.Reason != reason || !strings.Contains(err.Error(), words) {
		t.Fatalf("error %v of reason %q, want %s with %q", err, openstack.ReasonOf(err), reason, words)
	}
	t.Logf("%s: %v", reason, err)
	return e
}

// update changes an object behind the package's back.
func (sc *scene) update(path, kind string, fields map[string]any) {
	sc.t.Helper()
	testkit.Check(sc.t, sc.Network(sc.t.Context(), http.MethodPut, path, map[string]any{kind: fields}, nil))
}

// drop deletes an object behind the package's back.
func (sc *scene) drop(path string) {
	sc.t.Helper()
	testkit.Check(sc.t, sc.Network(sc.t.Context(), http.MethodDelete, path, nil, nil))
}

// tag gives an object other tags.
func (sc *scene) tag(path string, tags ...string) {
	sc.t.Helper()
	testkit.Check(sc.t, sc.Network(sc.t.Context(), http.MethodPut, path+"/tags", map[string]any{"tags": tags}, nil))
}
