package nft

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// Watch receives the kernel's notifications of changes of a table, whoever made them.
type Watch struct {
	*rtnl.Listener
	table *Table
}

// Watch begins to watch the table.
func (t *Table) Watch() (*Watch, error) {
	l, err := t.handle.Listen(nil, unix.NFNLGRP_NFTABLES)
	if err != nil {
		return nil, fmt.Errorf("watch nftables: %w", err)
	}
	return &Watch{l, t}, nil
}

// Run calls told when the table has, or may have, changed: at once and then at most once in every
// settle, until ctx ends.
func (w *Watch) Run(ctx context.Context, settle time.Duration, told func()) error {
	changed := false
	heard := func(m *rtnl.Message) { changed = changed || m == nil || w.table.concerns(m.Body) }
	err := w.Listener.Run(ctx, settle, heard, func() {
		if changed {
			told()
		}
		changed = false
	})
	if err != nil {
		return fmt.Errorf("watch nftables: %w", err)
	}
	return nil
}

// concerns says whether a notification is, or may be, about the table.
func (t *Table) concerns(body []byte) bool {
	var as rtnl.Attributes
	_, ours := t.about(&as, body)
	return ours || as.Err != nil
}
