package blocks

import (
	"time"

	"github.com/coil-net/coil/pkg/store"
)

// askAheadSize is the size of blocks from which on the node asks for the next
// block before it has none free. Addresses of smaller blocks are precious.
const askAheadSize = 16

// held has the facts about a block of one pool that decide needs.
type held struct {
	store.Usage
	// usable blocks give new addresses.
	usable bool
	// surplus blocks are too many, and given back.
	surplus bool
	// deleting blocks are given back as soon as they are empty.
	deleting bool
	// closed blocks give no address any more, and are given back as soon as they are empty.
	closed bool
	// reserved blocks are never given back unless an admin deletes them.
	reserved bool
	// age is for how long the node has held the block in this run.
	age time.Duration
}

func (h held) free() int { return h.Size() - h.Allocated - h.Cooling }

func (h held) empty() bool { return h.Allocated == 0 && h.Cooling == 0 }

// decision has the next steps for one pool.
type decision struct {
	ask     bool
	release []string // names of blocks
}

// decide says whether the node needs one more block of a pool and which blocks
// it gives back.
//
//	more ADDs wait than addresses are free   ask
//	fewer than a quarter of a block free     ask ahead, for blocks of 16 addresses or more
//	block empty and being deleted            release
//	block empty and closed                   release
//	surplus block, held for minAge           release
//	block empty, held for minAge, and the
//	others have half a block free, or no
//	address of the pool is in use            release
//
// Between "a quarter" and "half" nothing happens, so that a block doesn't come
// and go with one pod.
func decide(blocks []held, waiting int, minAge time.Duration) decision {
	var d decision
	free, used, size := 0, 0, 0
	for _, b := range blocks {
		used += b.Allocated
		if b.usable {
			free += b.free()
			size = max(size, b.Size())
		}
	}
	for _, b := range blocks {
		if !b.empty() {
			continue
		}
		if b.deleting || b.closed && !b.reserved || b.surplus && !b.reserved && b.age >= minAge {
			d.release = append(d.release, b.Name)
			continue
		}
		if b.reserved || !b.usable || b.age < minAge || waiting > 0 {
			continue
		}
		// rest is free in the other blocks. The next candidate sees it without this block.
		if rest := free - b.free(); used == 0 || rest*2 >= size {
			d.release = append(d.release, b.Name)
			free = rest
		}
	}
	d.ask = waiting > free ||
		used > 0 && size >= askAheadSize && free*4 < size
	return d
}
