package nft_test

import (
	"context"
	"testing"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/testkit"
)

// table is the table of a node, of a client or of a router.
type table[T interface{ Ruleset() dataplane.Ruleset }] struct{ *nft.Table }

func (t table[T]) Sync(ctx context.Context, want T) (dataplane.Result, error) {
	return t.Table.Sync(ctx, want.Ruleset())
}

func (t table[T]) Check(ctx context.Context, want T) error { return t.Table.Check(ctx, want.Ruleset()) }

func (t table[T]) Remove(ctx context.Context) error {
	_, err := t.Table.Sync(ctx, dataplane.Ruleset{})
	return err
}

func gatewayTable(t *testing.T, ns *netns.NS) table[ruleset.Gateway] {
	t.Helper()
	return table[ruleset.Gateway]{testkit.Must(nft.New(ns, dataplane.NftTable))(t)}
}

func clientTable(t *testing.T, ns *netns.NS) table[ruleset.Client] {
	t.Helper()
	return table[ruleset.Client]{testkit.Must(nft.NewOfPod(ns, dataplane.NftTable))(t)}
}

func hostTable(t *testing.T, ns *netns.NS) table[ruleset.Host] {
	t.Helper()
	return table[ruleset.Host]{testkit.Must(nft.New(ns, dataplane.NftTable))(t)}
}
