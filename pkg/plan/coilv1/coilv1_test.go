package coilv1_test

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"sigs.k8s.io/yaml"

	"github.com/coil-net/coil/pkg/plan/coilv1"
)

// healthy is what v1 has in etcd for two pools, two nodes and four pods.
func healthy() map[string]string {
	return map[string]string{
		"pool/default":           `{"subnets":["10.1.0.0/26","10.2.0.0/26"],"block_size":4}`,
		"pool/global":            `{"subnets":["192.0.2.0/29"],"block_size":0}`,
		"subnet/10.1.0.0":        "",
		"subnet/10.2.0.0":        "",
		"subnet/192.0.2.0":       "",
		"block/default/10.1.0.0": `{"free":["10.1.0.48/28"],"nodes":{"n1":["10.1.0.16/28","10.1.0.32/28"],"n2":["10.1.0.0/28"]}}`,
		"block/default/10.2.0.0": `{"free":["10.2.0.0/27","10.2.0.32/28"],"nodes":{"n1":["10.2.0.48/28"],"n2":[]}}`,
		"block/global/192.0.2.0": `{"free":["192.0.2.0/30","192.0.2.4/32","192.0.2.6/31"],"nodes":{"n2":["192.0.2.5/32"]}}`,
		"ip/10.1.0.16/0":         `{"container_id":"c1","namespace":"default","pod":"a","created_at":"2019-05-01T01:02:03.000004Z"}`,
		"ip/10.1.0.16/15":        "kube-system/dns-7d9",
		"ip/10.2.0.48/3":         `{"container_id":"c3","namespace":"app","pod":"web-0","created_at":"2019-05-01T01:02:03Z"}`,
		"ip/192.0.2.5/0":         `{"container_id":"c4","namespace":"global","pod":"b","created_at":"2019-05-01T01:02:03Z"}`,
	}
}

func entries(data map[string]string) []coilv1.Entry {
	var all []coilv1.Entry
	for _, k := range slices.Sorted(maps.Keys(data)) {
		all = append(all, coilv1.Entry{Key: k, Value: []byte(data[k])})
	}
	return all
}

var values = cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})

func TestParse(t *testing.T) {
	got, err := coilv1.Parse(entries(healthy()))
	if err != nil {
		t.Fatal(err)
	}
	prefix, addr := netip.MustParsePrefix, netip.MustParseAddr
	want := coilv1.State{
		Pools: []coilv1.Pool{
			{Name: "default", BlockSizeBits: 4, Subnets: []netip.Prefix{prefix("10.1.0.0/26"), prefix("10.2.0.0/26")}},
			{Name: "global", Subnets: []netip.Prefix{prefix("192.0.2.0/29")}},
		},
		Blocks: []coilv1.Block{
			{Pool: "default", Prefix: prefix("10.1.0.16/28"), Node: "n1", Used: []coilv1.Address{
				{Addr: addr("10.1.0.16"), Namespace: "default", Pod: "a"},
				{Addr: addr("10.1.0.31"), Namespace: "kube-system", Pod: "dns-7d9"},
			}},
			{Pool: "default", Prefix: prefix("10.2.0.48/28"), Node: "n1", Used: []coilv1.Address{{Addr: addr("10.2.0.51"), Namespace: "app", Pod: "web-0"}}},
			{Pool: "global", Prefix: prefix("192.0.2.5/32"), Node: "n2", Used: []coilv1.Address{{Addr: addr("192.0.2.5"), Namespace: "global", Pod: "b"}}},
		},
	}
	if d := cmp.Diff(want, got, values); d != "" {
		t.Errorf("state (-want +got):\n%s", d)
	}
}

// Each kind of data that can't be taken is refused, and its key is named.
func TestParseRefuses(t *testing.T) {
	const gone = "\x00"
	for name, c := range map[string]struct {
		key, value string // what differs from healthy
		blames     string // a key
		says       string
	}{
		"unknown kind":            {"lock/default", "x", "lock/default", "no such key"},
		"foreign key":             {"registry", "", "registry", "no such key"},
		"deeper key":              {"pool/default/x", "{}", "pool/default/x", "no such key"},
		"pool not JSON":           {"pool/default", "{", "pool/default", "can't be understood"},
		"pool cut":                {"pool/default", `{"subnets":["10.1.0.0/26"`, "pool/default", "can't be understood"},
		"pool followed":           {"pool/global", `{"subnets":["192.0.2.0/29"],"block_size":0}{}`, "pool/global", "more follows"},
		"pool with unknown field": {"pool/global", `{"subnets":["192.0.2.0/29"],"block_size":0,"ipv6":true}`, "pool/global", "ipv6"},
		"pool without size":       {"pool/global", `{"subnets":["192.0.2.0/29"]}`, "pool/global", "block_size is missing"},
		"pool too large":          {"pool/global", `{"subnets":["192.0.2.0/29"],"block_size":4}`, "pool/global", "smaller than a block"},
		"pool of IPv6":            {"pool/global", `{"subnets":["fd00::/64"],"block_size":0}`, "pool/global", "isn't an IPv4 range"},
		"pool with host bits":     {"pool/global", `{"subnets":["192.0.2.1/29"],"block_size":0}`, "pool/global", "host bits"},
		"pool with a bad name":    {"pool/Global_1", `{"subnets":["192.0.3.0/29"],"block_size":0}`, "pool/Global_1", "no AddressPool can have the name"},
		"pool overlaps":           {"pool/more", `{"subnets":["10.1.0.32/27"],"block_size":0}`, "pool/more", "overlaps"},
		"subnet without pool":     {"subnet/10.9.0.0", "", "subnet/10.9.0.0", "no pool has a subnet"},
		"subnet with value":       {"subnet/10.1.0.0", "x", "subnet/10.1.0.0", "v1 writes none"},
		"subnet no address":       {"subnet/ten", "", "subnet/ten", "isn't an IPv4 address"},
		"subnet half-written":     {"subnet/10.2.0.0", gone, "subnet/10.2.0.0", "missing"},
		"blocks half-written":     {"block/default/10.2.0.0", gone, "block/default/10.2.0.0", "missing"},
		"pool half-written":       {"pool/global", gone, "block/global/192.0.2.0", "there is no pool/global"},
		"blocks not JSON":         {"block/global/192.0.2.0", "null,", "block/global/192.0.2.0", "can't be understood"},
		"blocks elsewhere":        {"block/global/192.0.2.4", `{"free":[],"nodes":{}}`, "block/global/192.0.2.4", "no subnet that begins there"},
		"blocks outside":          {"block/global/192.0.2.0", `{"free":["192.0.3.0/32"],"nodes":{"n2":["192.0.2.5/32"]}}`, "block/global/192.0.2.0", "isn't within"},
		"blocks wider":            {"block/global/192.0.2.0", `{"free":["192.0.2.0/28"],"nodes":{"n2":["192.0.2.5/32"]}}`, "block/global/192.0.2.0", "isn't within"},
		"blocks twice":            {"block/global/192.0.2.0", `{"free":["192.0.2.4/31"],"nodes":{"n2":["192.0.2.5/32"]}}`, "block/global/192.0.2.0", "twice"},
		"blocks of two nodes":     {"block/global/192.0.2.0", `{"free":[],"nodes":{"n1":["192.0.2.5/32"],"n2":["192.0.2.5/32"]}}`, "block/global/192.0.2.0", "twice"},
		"blocks of another size":  {"block/global/192.0.2.0", `{"free":[],"nodes":{"n2":["192.0.2.4/31"]}}`, "block/global/192.0.2.0", "isn't a block of 1"},
		"blocks of no node":       {"block/global/192.0.2.0", `{"free":[],"nodes":{"":["192.0.2.5/32"]}}`, "block/global/192.0.2.0", "isn't the name of a node"},
		"address of nobody":       {"ip/192.0.2.6/0", "a/b", "ip/192.0.2.6/0", "no node holds"},
		"address outside":         {"ip/10.1.0.16/16", "a/b", "ip/10.1.0.16/16", "only 16 addresses"},
		"address below":           {"ip/10.1.0.16/-1", "a/b", "ip/10.1.0.16/-1", "isn't the offset"},
		"address written oddly":   {"ip/10.1.0.16/01", "a/b", "ip/10.1.0.16/01", "isn't the offset"},
		"address of no block":     {"ip/10.1.0.016/1", "a/b", "ip/10.1.0.016/1", "isn't an IPv4 address"},
		"address without pod":     {"ip/10.1.0.16/1", "default", "ip/10.1.0.16/1", "names no pod"},
		"address empty":           {"ip/10.1.0.16/1", "", "ip/10.1.0.16/1", "names no pod"},
		"address damaged":         {"ip/10.1.0.16/1", `{"namespace":"a","pod":"b"`, "ip/10.1.0.16/1", "can't be understood"},
		"address of other kind":   {"ip/10.1.0.16/1", `{"namespace":"a","pod":"b","mac":"x"}`, "ip/10.1.0.16/1", "mac"},
	} {
		t.Run(name, func(t *testing.T) {
			data := healthy()
			if data[c.key] = c.value; c.value == gone {
				delete(data, c.key)
			}
			got, err := coilv1.Parse(entries(data))
			if err == nil {
				t.Fatalf("Parse took %s = %s: %v", c.key, c.value, got)
			}
			for line := range strings.SplitSeq(err.Error(), "\n") {
				if strings.HasPrefix(line, `key "`+c.blames+`": `) && strings.Contains(line, c.says) {
					return
				}
			}
			t.Errorf("no line blames %q and says %q:\n%v", c.blames, c.says, err)
		})
	}
}

// All faults are told at once.
func TestParseNamesAll(t *testing.T) {
	data := healthy()
	data["pool/x"], data["ip/10.1.0.16/1"], data["odd"] = "{", "", ""
	_, err := coilv1.Parse(entries(data))
	if err == nil || strings.Count(err.Error(), "\n") != 2 {
		t.Errorf("want three lines:\n%v", err)
	}
}

func TestObjects(t *testing.T) {
	state, err := coilv1.Parse(entries(healthy()))
	if err != nil {
		t.Fatal(err)
	}
	pools, blocks, err := state.Objects()
	if err != nil {
		t.Fatal(err)
	}
	var got strings.Builder
	for _, p := range pools {
		text, _ := yaml.Marshal(p)
		got.Write(text)
	}
	for _, b := range blocks {
		text, _ := yaml.Marshal(b)
		got.Write(text)
	}
	const want = `apiVersion: coil.cybozu.com/v2
kind: AddressPool
metadata:
  name: default
spec:
  blockSizeBits: 4
  subnets:
  - ipv4: 10.1.0.0/26
  - ipv4: 10.2.0.0/26
apiVersion: coil.cybozu.com/v2
kind: AddressPool
metadata:
  name: global
spec:
  blockSizeBits: 0
  subnets:
  - ipv4: 192.0.2.0/29
apiVersion: coil.cybozu.com/v2
index: 1
ipv4: 10.1.0.16/28
kind: AddressBlock
metadata:
  finalizers:
  - coil.cybozu.com
  labels:
    coil.cybozu.com/node: n1
    coil.cybozu.com/pool: default
    coil.cybozu.com/reserved: "true"
  name: default-1
apiVersion: coil.cybozu.com/v2
index: 7
ipv4: 10.2.0.48/28
kind: AddressBlock
metadata:
  finalizers:
  - coil.cybozu.com
  labels:
    coil.cybozu.com/node: n1
    coil.cybozu.com/pool: default
    coil.cybozu.com/reserved: "true"
  name: default-7
apiVersion: coil.cybozu.com/v2
index: 5
ipv4: 192.0.2.5/32
kind: AddressBlock
metadata:
  finalizers:
  - coil.cybozu.com
  labels:
    coil.cybozu.com/node: n2
    coil.cybozu.com/pool: global
    coil.cybozu.com/reserved: "true"
  name: global-5
`
	if d := cmp.Diff(want, got.String()); d != "" {
		t.Errorf("objects (-want +got):\n%s", d)
	}
}

// FuzzParse: whatever is in etcd, an address in use is within exactly one block, and the blocks are the pools' own.
func FuzzParse(f *testing.F) {
	for k, v := range healthy() {
		f.Add(k, v)
	}
	f.Add("ip/10.1.0.16/1", `{"namespace":"a","pod":"b","created_at":"never"}`)
	f.Add("block/default/10.1.0.0", `{"free":null,"nodes":{"n":["10.1.0.16/28",""]}}`)
	f.Add("pool/default", `{"subnets":["0.0.0.0/0"],"block_size":32}`)
	f.Fuzz(func(t *testing.T, key, value string) {
		data := healthy()
		data[key] = value
		state, err := coilv1.Parse(entries(data))
		if err != nil {
			if !strings.Contains(err.Error(), "key ") {
				t.Errorf("the error names no key: %v", err)
			}
			return
		}
		_, blocks, err := state.Objects()
		if err != nil {
			return // the name of a node can't be a label
		}
		if len(blocks) != len(state.Blocks) {
			t.Errorf("%d objects of %d blocks", len(blocks), len(state.Blocks))
		}
		inUse := 0
		for k := range data {
			if strings.HasPrefix(k, "ip/") {
				inUse++
			}
		}
		seen := map[netip.Addr]bool{}
		for _, b := range state.Blocks {
			for _, a := range b.Used {
				if !b.Prefix.Contains(a.Addr) || seen[a.Addr] {
					t.Errorf("%s is in %s, and seen before: %t", a.Addr, b.Prefix, seen[a.Addr])
				}
				seen[a.Addr] = true
			}
		}
		if len(seen) != inUse {
			t.Errorf("%d addresses of %d keys", len(seen), inUse)
		}
	})
}
