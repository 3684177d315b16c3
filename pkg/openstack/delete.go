package openstack

import (
	"context"
	"errors"
	"strconv"
	"time"
)

func ifMatch(revision int) string { return "revision_number=" + strconv.Itoa(revision) }

// Delete deletes all objects of an address. Its pairs have to be taken from the gateways before (EnsurePairs): as long as the port exists,
// they can be told from those of others.
func (c *Client) Delete(ctx context.Context, key string) error {
	if err := checkKey(key); err != nil {
		return err
	}
	return c.do(ctx, func(s *session) error {
		f, err := s.find(ctx, key)
		if err != nil {
			return err
		}
		var errs []error
		for _, o := range f.objects() {
			errs = append(errs, s.delete(ctx, o, nil))
		}
		return errors.Join(errs...)
	})
}

// Sweep deletes the cluster's objects that no address of keep has: those of other keys, and second ones of the same key. It spares an object that
// is younger than the grace time, or that the last Sweep hasn't found unused: one that was made just now may be in a claim
// that the caller doesn't see yet. It spares, too, what somebody changes at the same time. It returns what it has deleted, also with an error.
func (c *Client) Sweep(ctx context.Context, keep map[string]bool) (deleted []Object, err error) {
	err = c.do(ctx, func(s *session) error {
		f, err := s.all(ctx)
		if err != nil {
			return err
		}
		var errs []error
		for _, o := range c.due(f.unused(s.marks, keep)) {
			err := s.delete(ctx, o, &o.object.Revision)
			switch {
			case err == nil:
				deleted = append(deleted, o)
			case ReasonOf(err) != Changed:
				errs = append(errs, err)
			}
		}
		return errors.Join(errs...)
	})
	return deleted, err
}

// unused are the objects that no address of keep has.
func (f found) unused(m marks, keep map[string]bool) (all []Object) {
	surplus := map[string]bool{}
	for _, a := range f.addresses(m, nil) {
		for _, id := range a.surplus {
			surplus[id] = true
		}
	}
	for _, o := range f.objects() {
		if !keep[o.Key] || surplus[o.ID] {
			all = append(all, o)
		}
	}
	return all
}

// due returns those of the unused objects that are to be deleted now, and remembers all of them for the next Sweep.
func (c *Client) due(unused []Object) (due []Object) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now, before := c.now(), c.unused
	c.unused = map[string]time.Time{}
	for _, o := range unused {
		since, again := before[o.ID]
		if !again {
			since = now
		}
		c.unused[o.ID] = since
		born := o.object.created()
		if born.IsZero() {
			born = since // a cloud that doesn't tell
		}
		if again && now.Sub(born) >= c.cfg.Grace {
			due = append(due, o)
		}
	}
	return due
}
