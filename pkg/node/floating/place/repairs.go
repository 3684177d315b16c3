package place

import (
	"context"
	"time"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/holding"
)

// Kinds of objects that others may destroy.
const (
	Route = "floating_route"
	Rules = "floating_rules"
)

// Kinds are the kinds with advice for the admin: which program is likely to destroy them.
var Kinds = map[string]string{
	Route: "a program deletes routes that it doesn't know: of systemd-networkd it is ManageForeignRoutes=no that ends this",
	Rules: "a program flushes all of nftables, or tables of others: nftables.service does, when it starts again, if /etc/nftables.conf begins with " +
		"\"flush ruleset\"; let that file flush its own tables",
}

// repaired is what was written to the kernel.
type repaired struct{ routes, rules dataplane.Result }

func (r repaired) plus(o repaired) repaired {
	return repaired{r.routes.Plus(o.routes), r.rules.Plus(o.rules)}
}

// tell counts what was written although nothing else was wanted than before.
func (p *Place) tell(ctx context.Context, r repaired) {
	if p.cfg.Repaired == nil {
		return
	}
	p.cfg.Repaired(ctx, Route, r.routes.Added+r.routes.Replaced)
	p.cfg.Repaired(ctx, Rules, r.rules.Added+r.rules.Replaced)
}

// earlier says that what an earlier life has left is to go.
func (p *Place) earlier() bool { return len(p.left) > 0 && time.Since(p.began) >= holding.Lease }
