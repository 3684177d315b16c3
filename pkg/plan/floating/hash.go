package floating

import "hash/fnv"

// Hash is a hash of a text.
func Hash(text string) uint64 {
	h := fnv.New64a()
	h.Write([]byte(text))
	// FNV alone hardly changes the high bits for names that differ in their last letter.
	return mix(h.Sum64())
}

// mix is the finalizer of MurmurHash3.
func mix(v uint64) uint64 {
	v = (v ^ v>>33) * 0xff51afd7ed558ccd
	v = (v ^ v>>33) * 0xc4ceb9fe1a85ec53
	return v ^ v>>33
}

// Draw returns the index of the one of some hashes that belongs to a key (rendezvous hashing): whatever others come and go, it is the same. There
// must be one.
func Draw(key uint64, among []uint64) int {
	best, most := 0, uint64(0)
	for i, h := range among {
		if w := mix(key ^ h); w > most {
			best, most = i, w
		}
	}
	return best
}
