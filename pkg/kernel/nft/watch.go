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
	heard := func(m *rtnl.Message) bool { return m == nil || w.table.concerns(m.Body) }
	if err := w.Listener.Run(ctx, settle, heard, told); err != nil {
		return fmt.Errorf("watch nftables: %w", err)
	}
	return nil
}

// concerns says whether a notification is, or may be, about the table.
func (t *Table) concerns(body []byte) bool {
	_, ours, as := t.about(body)
	return ours || as.Err != nil
}

// Touched says whether anybody has, or may have, changed any table of the namespace since the
// last Sync. To ask costs next to nothing.
func (t *Table) Touched(ctx context.Context) (bool, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now, err := t.currentGeneration(ctx)
	return !t.made || now != t.generation, err
}

// currentGeneration is another number after each change of any table of the namespace, whoever
// made it.
func (t *Table) currentGeneration(ctx context.Context) (uint32, error) {
	var id uint32
	r := rtnl.NewRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETGEN, 0, make([]byte, nfgenmsgSize), "generation of nftables")
	err := t.handle.Get(ctx, r, func(body []byte) error {
		_, attributes, as := rtnl.Cut(body, nfgenmsgSize)
		id = as.Find(attributes, unix.NFTA_GEN_ID).BE32()
		return as.Err
	})
	if err != nil {
		return 0, fmt.Errorf("read the generation of nftables: %w", err)
	}
	return id, nil
}
