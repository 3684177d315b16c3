package inspection

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestWriteDatabase(t *testing.T) {
	d := Database{Node: Node{Name: "n1"}, Schema: 2, Newest: 2, Meta: map[string]string{"node_name": "n1"}, Damage: []string{}, Blocks: []DatabaseBlock{{ID: 1, Name: "default-0"}}}
	for i := range 100 {
		d.Addresses = append(d.Addresses, DatabaseAddress{ID: int64(i), IPv4: fmt.Sprint("10.0.0.", i), State: []string{"attached", "cooling"}[i%2]})
	}
	free := func(state string) bool { return state == "cooling" }
	text, err := d.Write(DatabaseLimit, free)
	if err != nil {
		t.Fatal(err)
	}
	got, err := ParseDatabase(text)
	if diff := cmp.Diff(&d, got); err != nil || diff != "" {
		t.Errorf("read otherwise than written, %v (-want +got):\n%s", err, diff)
	}
	shorter, err := d.Write(len(text)-1, free)
	if err != nil || len(shorter) >= len(text) {
		t.Fatalf("%d of %d bytes, %v", len(shorter), len(text), err)
	}
	if got, err = ParseDatabase(shorter); err != nil || len(got.Addresses) != 50 || !strings.Contains(got.Truncated, "50 of 100 addresses are left out") || len(d.Addresses) != 100 {
		t.Errorf("%d addresses, %q, %v", len(got.Addresses), got.Truncated, err)
	}
	if _, err := d.Write(1000, free); err == nil {
		t.Error("1000 bytes are enough")
	}
}

func TestSum(t *testing.T) {
	sum := Sum{Bytes: 45056, SHA256: strings.Repeat("ab", 32)}
	const log = "I0101 Starting\n"
	for lines, want := range map[string]Sum{
		log + sum.String() + "\nI0101 Ended\n":              sum,
		sum.String():                                        sum,
		Sum{Bytes: 1}.String() + "\n" + sum.String() + "\n": sum,
		"":                             {},
		log:                            {},
		log + sum.String()[:20] + "\n": {},
		"what is it with " + sum.String() + ", asked the program": {},
	} {
		got, err := FindSum(lines)
		if got != want || (err == nil) != (want != Sum{}) {
			t.Errorf("%q: %+v, %v; want %+v", lines, got, err, want)
		}
	}
}
