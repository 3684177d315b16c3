package cluster

import (
	"bufio"
	"encoding/json"
	"fmt"
	"maps"
	"net/url"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/testkit"
)

// request is one request as the API server audits it.
type request struct {
	Verb       string
	RequestURI string
	User       struct {
		Username string
		Extra    map[string][]string
	}
	ResponseStatus struct{ Code int }
}

// audited returns the requests of a ServiceAccount of kube-system.
func audited(t *testing.T, account string) []request {
	t.Helper()
	f, err := os.Open(auditLog())
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var rs []request
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var r request
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			continue // the line that is being written
		}
		if r.User.Username == "system:serviceaccount:kube-system:"+account {
			rs = append(rs, r)
		}
	}
	return rs
}

// What a program may list and watch: resource and selector, NODE stands for its
// node. On a large cluster anything else would be too much.
func TestProgramsWatchOnlyWhatTheyNeed(t *testing.T) {
	e := use(t)
	ns := e.pool(t, 2, "10.76.0.0/28", "fd00:76::/124")
	e.start(t, ns, "p", 3, e.Nodes()...)
	e.running(t, ns, time.Minute)
	tests := []struct {
		account string
		allowed []string
	}{
		{"coild", []string{
			"/api/v1/nodes fieldSelector=metadata.name=NODE",
			"/api/v1/pods fieldSelector=spec.nodeName=NODE",
			"/api/v1/namespaces ",
			"/apis/coil.cybozu.com/v2/addressblocks labelSelector=coil.cybozu.com/node=NODE",
			"/apis/coil.cybozu.com/v2/blockrequests labelSelector=coil.cybozu.com/node=NODE",
		}},
		{"coil-router", []string{
			"/api/v1/nodes ",
			"/apis/coil.cybozu.com/v2/addressblocks ",
		}},
	}
	for _, tt := range tests {
		t.Run(tt.account, func(t *testing.T) {
			seen := map[string]bool{}
			// An API server that has just started forbids what it doesn't know yet to be
			// allowed: only what never was is missing.
			allowed, forbidden := map[string]bool{}, map[string]bool{}
			for _, r := range audited(t, tt.account) {
				path, _, _ := strings.Cut(r.RequestURI, "?")
				if r.ResponseStatus.Code == 403 {
					forbidden[r.Verb+" "+path] = true
				} else {
					allowed[r.Verb+" "+path] = true
				}
				if r.Verb != "list" && r.Verb != "watch" {
					continue
				}
				u, err := url.Parse(r.RequestURI)
				if err != nil {
					t.Fatal(err)
				}
				what := u.Path + " "
				for _, key := range []string{"fieldSelector", "labelSelector"} {
					if v := u.Query().Get(key); v != "" {
						what += key + "=" + v
					}
				}
				for _, node := range e.Nodes() {
					if s, ok := strings.CutSuffix(what, "="+node); ok {
						what = s + "=NODE"
						break
					}
				}
				seen[what] = true
			}
			for what := range forbidden {
				if !allowed[what] {
					t.Errorf("%s was forbidden: a right is missing", what)
				}
			}
			for what := range seen {
				if !slices.Contains(tt.allowed, what) {
					t.Errorf("it lists or watches %s", what)
				}
			}
			for _, what := range tt.allowed {
				if !seen[what] {
					t.Errorf("it does not watch %s; it watches %v", what, slices.Sorted(maps.Keys(seen)))
				}
			}
		})
	}
}

// At rest, no program of Coil uses the processor.
func TestIdle(t *testing.T) {
	e := use(t)
	const span = 20 * time.Second
	ticks := func() map[string]int {
		all := map[string]int{}
		for _, node := range e.Nodes() {
			out, err := e.Exec(t.Context(), node, "sh", "-c", `for p in /proc/[0-9]*; do read -r line < $p/stat 2>/dev/null && echo "$line"; done`)
			if err != nil {
				t.Fatal(err)
			}
			for line := range strings.Lines(string(out)) {
				open, closed := strings.Index(line, "("), strings.LastIndex(line, ")")
				program, f := line[open+1:closed], strings.Fields(line[closed+1:])
				if !strings.HasPrefix(program, "coil") || strings.HasPrefix(program, "coil-lab") {
					continue
				}
				var user, system int
				fmt.Sscan(f[11], &user)
				fmt.Sscan(f[12], &system)
				all[node+" "+program+" "+line[:open]] += user + system
			}
		}
		return all
	}
	// After a change programs finish what it started; the least of several spans counts.
	testkit.Eventually(t, 3*time.Minute, "Coil is idle", func() error {
		before := ticks()
		time.Sleep(span)
		var busy []string
		for who, n := range ticks() {
			// A hundred ticks are a second of a processor.
			if share := float64(n-before[who]) / (100 * span.Seconds()); share > 0.01 {
				busy = append(busy, fmt.Sprintf("%s uses %.1f %% of a processor", who, 100*share))
			}
		}
		if len(before) < 8 || len(busy) > 0 {
			return fmt.Errorf("of %d programs: %v", len(before), busy)
		}
		return nil
	})
}
