package openstack

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
)

// prepared is how many projects the template has: to make one takes a dozen calls.
const prepared = 24

// Project is a project of the cloud with a user, who is a member.
type Project struct {
	*Session `json:"-"`
	// Name is that of the project and of its user; the password is "secret".
	Name string
	// NetworkID is a network behind a router to the external network.
	NetworkID string
	// Subnet4 is 10.1.0.0/24, which the router serves, and Subnet6 fd00:1::/64.
	Subnet4, Subnet6 string
}

// NewProject returns a project that nobody has used.
func (c *Cloud) NewProject(ctx context.Context) (*Project, error) {
	n := int(c.projects.Add(1))
	if n > prepared {
		return c.makeProject(ctx, c.admin, c.external, n)
	}
	b, err := os.ReadFile(filepath.Join(c.conf.Dir, "projects.json"))
	if err != nil {
		return nil, err
	}
	var all []*Project
	if err := json.Unmarshal(b, &all); err != nil || len(all) < n {
		return nil, errors.Join(err, fmt.Errorf("the template has %d projects", len(all)))
	}
	p := all[n-1]
	p.Session, err = c.Login(ctx, p.Name, "secret", p.Name)
	return p, err
}

// makeProjects makes those of the template.
func (p *programs) makeProjects(ctx context.Context, admin *Session, external string) error {
	var all []*Project
	for n := range prepared {
		made, err := p.makeProject(ctx, admin, external, n+1)
		if err != nil {
			return err
		}
		all = append(all, made)
	}
	b, err := json.Marshal(all)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(p.conf.Dir, "projects.json"), b, 0o600)
}

func (p *programs) makeProject(ctx context.Context, admin *Session, external string, n int) (*Project, error) {
	q := &Project{Name: fmt.Sprint("project", n)}
	if err := admin.newUser(ctx, q.Name, q.Name, "secret", "member"); err != nil {
		return nil, err
	}
	var err error
	if q.Session, err = p.Login(ctx, q.Name, "secret", q.Name); err != nil {
		return nil, err
	}
	if q.NetworkID, err = q.Create(ctx, "network", map[string]any{"name": "machines"}); err != nil {
		return nil, err
	}
	if q.Subnet4, err = q.Create(ctx, "subnet", map[string]any{"network_id": q.NetworkID, "ip_version": 4, "cidr": "10.1.0.0/24"}); err != nil {
		return nil, err
	}
	if q.Subnet6, err = q.Create(ctx, "subnet", map[string]any{"network_id": q.NetworkID, "ip_version": 6, "cidr": "fd00:1::/64"}); err != nil {
		return nil, err
	}
	router, err := q.Create(ctx, "router", map[string]any{"external_gateway_info": map[string]any{"network_id": external}})
	if err != nil {
		return nil, err
	}
	return q, q.Network(ctx, http.MethodPut, "routers/"+router+"/add_router_interface", map[string]any{"subnet_id": q.Subnet4}, nil)
}
