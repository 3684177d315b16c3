package pools

import (
	"time"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

const (
	// ForecastWindow is how far back a forecast looks.
	ForecastWindow = 24 * time.Hour
	// leastWindow is how old a pool is at least of which there is a forecast: the first blocks come all at once.
	leastWindow = time.Hour
)

// Forecast is when a pool may have no block left. It is an estimate: objects don't tell of blocks that were given back, so blocks that only come and go count as growth,
// and the pool lasts longer.
type Forecast struct {
	// Free is how many blocks can be carved.
	Free int64 `json:"free"`
	// Taken is how many of those that exist were carved within Seconds, which is ForecastWindow, or the age of a younger pool.
	Taken   int64 `json:"taken"`
	Seconds int64 `json:"seconds"`
	// FullInSeconds is when the last one is carved at the earliest, if the pool goes on as within Seconds. Nil if that isn't known, or never.
	FullInSeconds *int64 `json:"fullInSeconds,omitempty"`
}

// Expect returns the forecast of a pool that has some blocks, which may be those of other pools, too.
func Expect(pool *v2.AddressPool, blocks []*v2.AddressBlock, now time.Time) Forecast {
	window := min(ForecastWindow, max(0, now.Sub(pool.CreationTimestamp.Time)))
	f := Forecast{Seconds: int64(window.Seconds())}
	p, err := Parse(pool.Spec)
	if err != nil {
		return f // nothing can be carved
	}
	f.Free = p.Available()
	closer := NewCloser(pool)
	for _, b := range blocks {
		if b.Labels[v2.LabelPool] != pool.Name {
			continue
		}
		if !closer.Excluded(b) {
			f.Free--
		}
		if now.Sub(b.CreationTimestamp.Time) <= window {
			f.Taken++
		}
	}
	f.Free = max(0, f.Free)
	if f.Taken > 0 && window >= leastWindow && !pool.Spec.Drain && pool.DeletionTimestamp == nil {
		full := int64(float64(f.Seconds) * float64(f.Free) / float64(f.Taken))
		f.FullInSeconds = &full
	}
	return f
}
