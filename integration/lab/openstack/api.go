package openstack

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
)

const (
	region       = "RegionOne"
	externalName = "external"
)

// Session is a user's login. Its requests go to the cloud itself, past any Front.
type Session struct {
	identity, network string
	// Token is the user's.
	Token string
	// UserID and ProjectID are the user's.
	UserID, ProjectID string
}

// StatusError is an answer that isn't a success.
type StatusError struct {
	Code int
	Body string
}

func (e *StatusError) Error() string { return fmt.Sprintf("%d: %s", e.Code, e.Body) }

// Login logs in by a password.
func (p *programs) Login(ctx context.Context, user, password, project string) (*Session, error) {
	domain := map[string]any{"id": "default"}
	body := map[string]any{"auth": map[string]any{
		"identity": map[string]any{"methods": []string{"password"}, "password": map[string]any{
			"user": map[string]any{"name": user, "password": password, "domain": domain}}},
		"scope": map[string]any{"project": map[string]any{"name": project, "domain": domain}},
	}}
	s := &Session{identity: p.IdentityURL() + "/v3/", network: p.NetworkURL() + "/v2.0/"}
	var answer struct {
		Token struct {
			User, Project struct{ ID string }
		}
	}
	header, err := s.send(ctx, http.MethodPost, s.identity+"auth/tokens", body, &answer, nil)
	if err != nil {
		return nil, fmt.Errorf("log in as %s: %w", user, err)
	}
	s.Token, s.UserID, s.ProjectID = header.Get("X-Subject-Token"), answer.Token.User.ID, answer.Token.Project.ID
	return s, nil
}

// Identity makes a call of Keystone: the path is that after /v3/. body and answer are JSON, and may be nil. headers are pairs
// of a name and a value.
func (s *Session) Identity(ctx context.Context, method, path string, body, answer any, headers ...string) error {
	_, err := s.send(ctx, method, s.identity+path, body, answer, headers)
	return err
}

// Network makes a call of Neutron: the path is that after /v2.0/. headers are as in Identity.
func (s *Session) Network(ctx context.Context, method, path string, body, answer any, headers ...string) error {
	_, err := s.send(ctx, method, s.network+path, body, answer, headers)
	return err
}

func (s *Session) send(ctx context.Context, method, url string, body, answer any, headers []string) (http.Header, error) {
	var content io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		content = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, url, content)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	if s.Token != "" {
		req.Header.Set("X-Auth-Token", s.Token)
	}
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode >= 300 {
		return nil, fmt.Errorf("%s %s: %w", method, url, &StatusError{resp.StatusCode, string(b)})
	}
	if answer != nil {
		if err := json.Unmarshal(b, answer); err != nil {
			return nil, fmt.Errorf("%s %s: %w in %s", method, url, err, b)
		}
	}
	return resp.Header, nil
}

// created makes an object and returns its ID. The kind is its name in JSON.
func created(ctx context.Context, call func(context.Context, string, string, any, any, ...string) error, path, kind string, object map[string]any) (string, error) {
	answer := map[string]struct{ ID string }{}
	err := call(ctx, http.MethodPost, path, map[string]any{kind: object}, &answer)
	return answer[kind].ID, err
}

// Create makes an object of Neutron, such as a "port", and returns its ID.
func (s *Session) Create(ctx context.Context, kind string, object map[string]any) (string, error) {
	return created(ctx, s.Network, kind+"s", kind, object)
}

// Admin is the cloud's admin.
func (c *Cloud) Admin() *Session { return c.admin }

// ExternalID is the network that floating IPs are of: 203.0.113.0/24 and 2001:db8:113::/64.
func (c *Cloud) ExternalID() string { return c.external }

// populate makes the objects that all clouds have.
func (p *programs) populate(ctx context.Context) error {
	admin, err := p.Login(ctx, "admin", "admin", "admin")
	if err != nil {
		return err
	}
	service, err1 := created(ctx, admin.Identity, "services", "service", map[string]any{"type": "network", "name": "neutron"})
	_, err2 := created(ctx, admin.Identity, "endpoints", "endpoint",
		map[string]any{"service_id": service, "interface": "public", "region_id": region, "url": p.NetworkURL()})
	err3 := admin.newUser(ctx, "service", "neutron", "neutron", "admin")
	err4 := admin.Identity(ctx, http.MethodPost, "roles", map[string]any{"role": map[string]any{"name": "member"}}, nil)
	if conflict := new(StatusError); errors.As(err4, &conflict) && conflict.Code == http.StatusConflict {
		err4 = nil // bootstrap makes it
	}
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		return err
	}
	network, err := admin.Create(ctx, "network", map[string]any{"name": externalName, "router:external": true,
		"provider:network_type": "flat", "provider:physical_network": externalName})
	if err != nil {
		return err
	}
	for version, cidr := range map[int]string{4: "203.0.113.0/24", 6: "2001:db8:113::/64"} {
		if _, err := admin.Create(ctx, "subnet", map[string]any{"network_id": network, "ip_version": version, "cidr": cidr}); err != nil {
			return err
		}
	}
	return p.makeProjects(ctx, admin, network)
}

// newUser makes a project, and a user with a role in it.
func (s *Session) newUser(ctx context.Context, project, user, password, role string) error {
	p, err := created(ctx, s.Identity, "projects", "project", map[string]any{"name": project, "domain_id": "default"})
	if err != nil {
		return err
	}
	u, err := created(ctx, s.Identity, "users", "user", map[string]any{"name": user, "password": password, "domain_id": "default"})
	if err != nil {
		return err
	}
	var roles struct{ Roles []struct{ ID string } }
	if err := s.Identity(ctx, http.MethodGet, "roles?name="+role, nil, &roles); err != nil {
		return err
	}
	if len(roles.Roles) != 1 {
		return fmt.Errorf("there are %d roles %s", len(roles.Roles), role)
	}
	return s.Identity(ctx, http.MethodPut, strings.Join([]string{"projects", p, "users", u, "roles", roles.Roles[0].ID}, "/"), nil, nil)
}

// publish tells Keystone where both programs are in this run: Neutron finds Keystone so, too.
func (c *Cloud) publish(ctx context.Context) error {
	for kind, url := range map[string]string{"identity": c.IdentityURL() + "/v3", "network": c.NetworkURL()} {
		var services struct{ Services []struct{ ID string } }
		if err := c.admin.Identity(ctx, http.MethodGet, "services?type="+kind, nil, &services); err != nil {
			return err
		}
		for _, s := range services.Services {
			var found struct{ Endpoints []struct{ ID string } }
			if err := c.admin.Identity(ctx, http.MethodGet, "endpoints?service_id="+s.ID, nil, &found); err != nil {
				return err
			}
			for _, e := range found.Endpoints {
				body := map[string]any{"endpoint": map[string]any{"url": url}}
				if err := c.admin.Identity(ctx, http.MethodPatch, "endpoints/"+e.ID, body, nil); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func (c *Cloud) findExternal(ctx context.Context) error {
	var found struct{ Networks []struct{ ID string } }
	if err := c.admin.Network(ctx, http.MethodGet, "networks?name="+externalName, nil, &found); err != nil {
		return err
	}
	if len(found.Networks) != 1 {
		return fmt.Errorf("there are %d external networks", len(found.Networks))
	}
	c.external = found.Networks[0].ID
	return nil
}
