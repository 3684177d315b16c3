package sqlite

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"os"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/store"
)

// applicationID marks the file as Coil's in its header: "Coil" in ASCII.
const applicationID = 0x436f696c

//go:embed migrations/*.sql
var migrationFiles embed.FS

// migrations returns the scripts that make the schema, the version i+1 from i.
// They only ever get more: a script that was released never changes.
func migrations() ([]string, error) {
	names, err := migrationFiles.ReadDir("migrations")
	if err != nil {
		return nil, err
	}
	var scripts []string
	for i, n := range names { // sorted by name
		number, _, _ := strings.Cut(n.Name(), "_")
		if v, err := strconv.Atoi(number); err != nil || v != i+1 {
			return nil, fmt.Errorf("migration %s isn't number %d", n.Name(), i+1)
		}
		text, err := migrationFiles.ReadFile(path.Join("migrations", n.Name()))
		if err != nil {
			return nil, err
		}
		scripts = append(scripts, string(text))
	}
	return scripts, nil
}

// migrate brings the schema to the newest version, each step in a transaction of
// its own. Before the first step that changes something, the file is copied to a
// name with its version.
func migrate(ctx context.Context, db *pool, file string, scripts []string, now time.Time) error {
	var version int
	if err := db.QueryRowContext(ctx, `PRAGMA user_version`).Scan(&version); err != nil {
		return err
	}
	if version > 0 && version < len(scripts) {
		to := fmt.Sprintf("%s.%s-v%d", file, now.UTC().Format("20060102T150405Z"), version)
		// A copy that an earlier start left unfinished can't be continued.
		if err := os.Remove(to); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		if _, err := db.ExecContext(ctx, `VACUUM INTO ?`, to); err != nil {
			err = fmt.Errorf("copy the record before its schema changes: %w", err)
			// On a full disk each start would leave another one.
			for _, suffix := range []string{"", "-journal"} {
				if rerr := os.Remove(to + suffix); rerr != nil && !errors.Is(rerr, os.ErrNotExist) {
					err = errors.Join(err, rerr)
				}
			}
			return err
		}
		prune(file, to)
	}
	for i := version; i < len(scripts); i++ {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		script := fmt.Sprintf("%s;\nPRAGMA application_id = %d;\nPRAGMA user_version = %d;\n", scripts[i], applicationID, i+1)
		if i == 0 {
			script += `UPDATE meta SET value = '` + formatTime(now) + `' WHERE key = 'created_at';`
		}
		if _, err = tx.ExecContext(ctx, script); err == nil {
			err = tx.Commit()
		}
		if err != nil {
			_ = tx.Rollback()
			return fmt.Errorf("make version %d of the schema: %w", i+1, err)
		}
	}
	return nil
}

// decode reads the values that the types and constraints of the schema can't vouch
// for: texts that must mean something, and addresses that must be their block's. A
// wrong range would give addresses that belong to another node. It returns the allocations.
func decode(ctx context.Context, in *pool) ([]store.Allocation, error) {
	known, err := query(ctx, in, scanBlock, blocksSQL)
	if err != nil {
		return nil, err
	}
	blocks := map[int64]*block{}
	for _, b := range known {
		blocks[b.id] = b
	}
	all, listErr := query(ctx, in, allocation, listSQL)
	_, clientsErr := query(ctx, in, scanClient, listClientsSQL)
	if err := errors.Join(listErr, clientsErr); err != nil {
		return nil, err
	}
	check := func(row scanner) (none struct{}, err error) {
		var id, blockID int64
		var offset int
		var have ipam.Address
		if err := row.Scan(&id, &blockID, &offset, address{&have.IPv4}, address{&have.IPv6}); err != nil {
			return none, err
		}
		b := blocks[blockID]
		if b == nil || offset >= b.Size() {
			return none, fmt.Errorf("%w: row %d isn't of a block", ErrDamaged, id)
		}
		if want := b.At(offset); have.IPv4.IsValid() && have.IPv4 != want.IPv4 || have.IPv6.IsValid() && have.IPv6 != want.IPv6 {
			return none, fmt.Errorf("%w: row %d isn't at offset %d of %s", ErrDamaged, id, offset, b.Name)
		}
		return none, nil
	}
	_, err = query(ctx, in, check, `SELECT address_id, block_id, block_offset, ipv4, ipv6 FROM addresses WHERE block_id IS NOT NULL`)
	return all, err
}

// examine says what is wrong with the file as a record of the node, or "". An error is a finding only if it says that
// the file is broken: otherwise the disk or another process kept the file from being read.
func examine(ctx context.Context, in *pool, known int, id store.Identity) (Reason, error) {
	var app, version, objects int
	if err := in.row(ctx, `SELECT (SELECT application_id FROM pragma_application_id),
			(SELECT user_version FROM pragma_user_version), (SELECT count(*) FROM sqlite_schema)`).Scan(&app, &version, &objects); err != nil {
		return "", err
	}
	switch {
	case app == 0 && version == 0 && objects == 0:
		return Missing, nil // a process ended while it made the file
	case app != applicationID:
		return OtherProgram, nil
	case version > known:
		return NewerSchema, nil
	case version == 0:
		return Damaged, nil
	}
	var verdict string
	if err := in.row(ctx, `PRAGMA integrity_check(1)`).Scan(&verdict); err != nil {
		return "", err
	}
	if verdict != "ok" {
		return Damaged, nil
	}
	have, err := readMeta(ctx, in)
	if err != nil {
		return "", err
	}
	if !matches(have.identity(), id) {
		return OtherNode, nil
	}
	return "", nil
}
