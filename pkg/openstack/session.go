package openstack

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"

	"github.com/gophercloud/gophercloud/v2"
	gopenstack "github.com/gophercloud/gophercloud/v2/openstack"
	"github.com/gophercloud/gophercloud/v2/openstack/config/clouds"
	"github.com/gophercloud/gophercloud/v2/openstack/identity/v3/tokens"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/subnets"
)

// session is a login, with what doesn't change while it lasts.
type session struct {
	net     *gophercloud.ServiceClient
	marks   marks
	project string
	network string
	subnets []subnet // as they are configured
}

// subnet is one that addresses are of.
type subnet struct {
	id     string
	prefix netip.Prefix
	// named is the address of it that is wanted, invalid if any is.
	named netip.Addr
}

// do calls f with the session. A session whose credentials were refused is forgotten: the next call reads them anew, since
// an admin may have changed them meanwhile.
func (c *Client) do(ctx context.Context, f func(*session) error) error {
	s, err := c.connect(ctx)
	if err != nil {
		return err
	}
	if err = f(s); ReasonOf(err) == AuthFailed {
		c.forget(s)
	}
	return err
}

// connect returns the session; one caller logs in, and the others wait for it.
func (c *Client) connect(ctx context.Context) (*session, error) {
	select {
	case c.login <- struct{}{}:
		defer func() { <-c.login }()
	case <-ctx.Done():
		return nil, explain("log in", context.Cause(ctx))
	}
	c.mu.Lock()
	s := c.session
	c.mu.Unlock()
	if s != nil {
		return s, nil
	}
	s, err := c.open(ctx)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.session = s
	return s, nil
}

func (c *Client) forget(s *session) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.session == s {
		c.session = nil
		s.net.HTTPClient.CloseIdleConnections()
	}
}

// open logs in and reads the subnets.
func (c *Client) open(ctx context.Context) (*session, error) {
	provider, at, err := c.provider(ctx)
	if err != nil {
		return nil, err
	}
	s := &session{marks: c.marks}
	// Only the project is read of the token: one of a credential that expires has a time that gophercloud can't parse.
	token, ok := provider.GetAuthResult().(tokens.CreateResult)
	if !ok {
		return nil, misconfigured("log in: it isn't by the API v3 of Keystone")
	}
	project, err := token.ExtractProject()
	if err != nil {
		return nil, explain("read the project of the token", err)
	}
	if project == nil {
		return nil, misconfigured("log in: the credentials are of no project")
	}
	s.project = project.ID
	if s.net, err = gopenstack.NewNetworkV2(provider, at); err != nil {
		return nil, explain("find Neutron in the list of services", err)
	}
	for _, id := range c.cfg.SubnetIDs {
		if err := s.addSubnet(ctx, id); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// provider reads the file and logs in.
func (c *Client) provider(ctx context.Context) (*gophercloud.ProviderClient, gophercloud.EndpointOpts, error) {
	var options []clouds.ParseOption
	if c.cfg.CloudsFile != "" {
		options = append(options, clouds.WithLocations(c.cfg.CloudsFile))
	}
	if c.cfg.Cloud != "" {
		options = append(options, clouds.WithCloudName(c.cfg.Cloud))
	}
	auth, at, tlsConfig, err := clouds.Parse(options...)
	if err != nil {
		return nil, at, misconfigured("read clouds.yaml: %w", err)
	}
	auth.AllowReauth = auth.TokenID == "" // a token can't be renewed
	provider, err := gopenstack.NewClient(auth.IdentityEndpoint)
	if err != nil {
		return nil, at, misconfigured("read clouds.yaml: auth_url: %w", err)
	}
	base, ok := http.DefaultTransport.(*http.Transport)
	if !ok {
		return nil, at, errors.New("the default transport isn't http.Transport")
	}
	base = base.Clone()
	base.TLSClientConfig = tlsConfig
	base.MaxIdleConnsPerHost = c.cfg.Parallel
	provider.HTTPClient = http.Client{Transport: newTransport(base, c.cfg.Parallel, c.cfg.Observe)}
	provider.UserAgent.Prepend("coil")
	if err := gopenstack.Authenticate(ctx, provider, auth); err != nil {
		return nil, at, explain("log in at "+auth.IdentityEndpoint, err)
	}
	return provider, at, nil
}

// addSubnet reads a subnet. The network is that of the first one.
func (s *session) addSubnet(ctx context.Context, id string) error {
	got, err := subnets.Get(ctx, s.net, id).Extract()
	if err != nil {
		return explain("read subnet "+id, err)
	}
	prefix, err := netip.ParsePrefix(got.CIDR)
	if err != nil {
		return misconfigured("read subnet %s: %w", id, err)
	}
	if s.network == "" {
		s.network = got.NetworkID
	}
	if s.network != got.NetworkID {
		return misconfigured("subnet %s is of network %s, and the one before of %s", id, got.NetworkID, s.network)
	}
	for _, other := range s.subnets {
		if other.prefix.Addr().Is4() == prefix.Addr().Is4() {
			return misconfigured("the subnets %s and %s are of the same family", other.id, id)
		}
	}
	s.subnets = append(s.subnets, subnet{id: id, prefix: prefix})
	return nil
}

// wanted are the subnets of the wanted families.
func (s *session) wanted(w Want) (all []subnet) {
	for _, n := range s.subnets {
		if w.of(n.prefix.Addr()) {
			n.named = w.named(n.prefix.Addr().Is4())
			all = append(all, n)
		}
	}
	return all
}

func misconfigured(format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	return &Error{Reason: Misconfigured, Message: err.Error(), err: err}
}
