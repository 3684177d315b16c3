package routerhealth

import (
	"strings"
	"testing"
	"time"
)

// Each letter is a second: + an answer, - none, ? none while that is in doubt; the result has D where the router is dead.
func TestLiveness(t *testing.T) {
	for _, c := range []struct {
		name, asked, want string
		alone             bool // no other router answers
	}{
		{"answers", "+++++", ".....", false},
		{"two misses are none", "+--+--+--+", "..........", false},
		{"three are", "+---", "...D", false},
		{"comes back after three answers in a row", "+---+++", "...DDD.", false},
		{"in a row", "+---++-++-+++", "...DDDDDDDDD.", false},
		{"never answered", "----", "..DD", false},
		{"never answered, and nobody else does", "--------", "........", true},
		{"the last one", "+-----", "...DDD", true},
		{"all may be silent", "+--??-", ".....D", true},
		{"all may be, for long", "+--?????", "......DD", true},
		{"all may be, and then answer", "+--??+--+", ".........", false},
		{"flaps: it takes twice as long each time", "+---+++---++++++---++++++++++++", "...DDD...DDDDDD...DDDDDDDDDDDD.", false},
		{"never asked", "", "", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			now := time.Unix(1000, 0)
			var l liveness
			var got strings.Builder
			for _, a := range c.asked {
				now = now.Add(time.Second)
				was := l.dead
				l.note(now, a == '+')
				if changed := l.judge(now, !c.alone, a == '?'); changed != (was != l.dead) {
					t.Errorf("changed is %t", changed)
				}
				got.WriteString(map[bool]string{true: "D", false: "."}[l.dead])
			}
			if got.String() != c.want {
				t.Errorf("asked %s\ngot   %s\nwant  %s", c.asked, got.String(), c.want)
			}
		})
	}
}

// A router that lived for long is as good as new.
func TestLivenessForgives(t *testing.T) {
	now := time.Unix(1000, 0)
	var l liveness
	step := func(answer bool, times int) {
		for range times {
			now = now.Add(time.Second)
			l.note(now, answer)
			l.judge(now, true, false)
		}
	}
	step(true, 1)
	for range 8 {
		step(false, 3)
		if !l.dead {
			t.Fatal("it lives after three misses")
		}
		step(true, mostAnswers)
		if l.dead {
			t.Fatalf("it is dead after %d answers", mostAnswers)
		}
	}
	if l.needed != mostAnswers {
		t.Errorf("it needs %d answers", l.needed)
	}
	step(true, 301)
	step(false, 3)
	step(true, 3)
	if l.dead {
		t.Errorf("it needs %d answers after five minutes", l.needed)
	}
}
