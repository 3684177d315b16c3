package openstack

import (
	"context"
	"errors"
	"net/http"
	"slices"

	"github.com/gophercloud/gophercloud/v2"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/extensions/attributestags"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/extensions/layer3/floatingips"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/ports"
)

// The words of Neutron's paths.
const (
	portsResource  = "ports"
	floatsResource = "floatingips"
)

// Ensure makes an address what is wanted, and returns it. seen is what List or Ensure has returned for it, or only its key. If that is all that is wanted,
// no call is made; what others have changed since then is repaired after the next List. Otherwise the cloud is asked anew: 4 calls, and 4 more for
// an address that is new and has a floating IP.
//
// An error doesn't undo what was done: the next Ensure goes on. The address that comes with it has what is known to be there.
func (c *Client) Ensure(ctx context.Context, seen Address, want Want) (a Address, err error) {
	if err := checkKey(seen.Key); err != nil {
		return seen, err
	}
	err = c.do(ctx, func(s *session) error {
		a = seen
		if err := want.validate(c.cfg, s); err != nil {
			return err
		}
		wanted := s.wanted(want)
		if seen.complete(s.marks, wanted, want) {
			return nil
		}
		f, err := s.find(ctx, seen.Key)
		if err != nil {
			return err
		}
		a = newAddress(s.marks, seen.Key, f, s.subnets)
		if err := s.ensurePort(ctx, &a, wanted, want.Replace); err != nil {
			return err
		}
		return s.ensureFloat(ctx, &a, want, c.cfg.FloatingNetworkID)
	})
	return a, err
}

// ensurePort makes the port of an address, its fixed addresses and its tags.
func (s *session) ensurePort(ctx context.Context, a *Address, wanted []subnet, replace bool) error {
	defer func() { a.describe(s.marks, s.subnets) }()
	if a.port == nil {
		opts := ports.CreateOpts{NetworkID: s.network, Name: s.marks.name(a.Key), Description: s.marks.description(a.Key), FixedIPs: added(nil, wanted)}
		got, err := made(ports.Create(ctx, s.net, opts).Result)
		if err != nil {
			return explain("create the port of address "+a.Key, err)
		}
		a.port = got.Port
	} else if lacking := a.lacking(wanted); len(lacking) > 0 {
		keep := a.port.FixedIPs
		if replace {
			keep = without(keep, lacking)
		}
		opts := ports.UpdateOpts{FixedIPs: added(keep, lacking), RevisionNumber: &a.port.Revision}
		got, err := made(ports.Update(ctx, s.net, a.port.ID, opts).Result)
		if err != nil {
			return explain("give port "+a.port.ID+" of address "+a.Key+" an address of each family", err)
		}
		a.port = got.Port
	}
	return s.tag(ctx, portsResource, a.Key, &a.port.object)
}

// made reads the answer to a write.
func made(r gophercloud.Result) (got answer, err error) {
	if err = r.ExtractInto(&got); err == nil && got.Port == nil && got.Float == nil {
		err = errors.New("the answer has no object")
	}
	return got, err
}

// added are fixed addresses with one more of each of some subnets. Neutron chooses those that aren't named: on a network of another project, this one may not.
func added(have []fixedIP, of []subnet) []fixedIP {
	all := slices.Clone(have)
	for _, s := range of {
		more := fixedIP{SubnetID: s.id}
		if s.named.IsValid() {
			more.IPAddress = s.named.String()
		}
		all = append(all, more)
	}
	return all
}

// without are fixed addresses but for those of some subnets.
func without(have []fixedIP, of []subnet) []fixedIP {
	return slices.DeleteFunc(slices.Clone(have), func(f fixedIP) bool {
		return slices.ContainsFunc(of, func(s subnet) bool { return s.id == f.SubnetID })
	})
}

// ensureFloat makes the floating IP of an address, if it is wanted, and its tags.
func (s *session) ensureFloat(ctx context.Context, a *Address, w Want, network string) error {
	defer func() { a.describe(s.marks, s.subnets) }()
	named := w.named(true)
	switch {
	case a.float == nil && !w.Floating:
		return nil
	case a.float == nil:
		opts := floatingips.CreateOpts{FloatingNetworkID: network, PortID: a.port.ID, FixedIP: a.fixed4(named).String(), Description: s.marks.description(a.Key)}
		got, err := made(floatingips.Create(ctx, s.net, opts).Result)
		if err != nil {
			return explain("create the floating IP of address "+a.Key, err)
		}
		a.float = got.Float
	case w.Floating && !a.leads(named):
		opts := floatingips.UpdateOpts{PortID: &a.port.ID, FixedIP: a.fixed4(named).String(), RevisionNumber: &a.float.Revision}
		got, err := made(floatingips.Update(ctx, s.net, a.float.ID, opts).Result)
		if err != nil {
			return explain("lead floating IP "+a.float.Address+" to address "+a.Key, err)
		}
		a.float = got.Float
	}
	return s.tag(ctx, floatsResource, a.Key, &a.float.object)
}

// tag gives an object the tags that it lacks; it keeps those of others.
func (s *session) tag(ctx context.Context, kind, key string, o *object) error {
	if s.marks.tagged(key, o.Tags) {
		return nil
	}
	all := slices.Clone(o.Tags)
	for _, t := range s.marks.tags(key) {
		if !slices.Contains(all, t) { // Neutron takes none twice
			all = append(all, t)
		}
	}
	got, err := attributestags.ReplaceAll(ctx, s.net, kind, o.ID, attributestags.ReplaceAllOpts{Tags: all}).Extract()
	if err != nil {
		return explain("tag "+kind+" "+o.ID+" of address "+key, err)
	}
	o.Tags = got
	return nil
}

// delete deletes an object. That it is gone already is fine. With a revision it is deleted only if nobody has changed it since then.
func (s *session) delete(ctx context.Context, o Object, revision *int) error {
	opts := &gophercloud.RequestOpts{}
	if revision != nil {
		opts.MoreHeaders = map[string]string{"If-Match": ifMatch(*revision)}
	}
	resp, err := s.net.Delete(ctx, s.net.ServiceURL(o.Resource, o.ID), opts)
	_, _, err = gophercloud.ParseResponse(resp, err)
	if gophercloud.ResponseCodeIs(err, http.StatusNotFound) {
		return nil
	}
	return explain("delete "+o.String(), err)
}
