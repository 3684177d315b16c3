package sysdump

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/plan/health"
)

func parse(t *testing.T, text string) (o map[string]any) {
	t.Helper()
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		t.Fatal(err)
	}
	return o
}

// Values of variables, foreign annotations and what was applied are gone, wherever they are in an object; names, and what Coil wrote, stay.
func TestClean(t *testing.T) {
	o := parse(t, `{"kind":"Deployment","metadata":{"name":"x","managedFields":[{"manager":"m"}],"annotations":{
			"kubectl.kubernetes.io/last-applied-configuration":"hidden1","example.com/note":"hidden2","coil.cybozu.com/pool":"blue","egress.coil.cybozu.com/internet":"nat","plain":"hidden3"}},
		"spec":{"template":{"metadata":{"annotations":{"vault.example/secret":"hidden4"}},"spec":{"containers":[
			{"name":"c","env":[{"name":"PASSWORD","value":"hidden5"},{"name":"NODE","valueFrom":{"fieldRef":{"fieldPath":"spec.nodeName"}}}],
			 "args":["--token=hidden6","--db.password","hidden8","--secret","--v=2"],"livenessProbe":{"httpGet":{"httpHeaders":[{"name":"Authorization","value":"Basic hidden7"}]}}}]}}}}`)
	Clean(o)
	want := parse(t, `{"kind":"Deployment","metadata":{"name":"x","annotations":{"coil.cybozu.com/pool":"blue","egress.coil.cybozu.com/internet":"nat"}},
		"spec":{"template":{"metadata":{"annotations":{}},"spec":{"containers":[
			{"name":"c","env":[{"name":"PASSWORD","value":"REMOVED"},{"name":"NODE","valueFrom":{"fieldRef":{"fieldPath":"spec.nodeName"}}}],
			 "args":["--token=REMOVED","--db.password","REMOVED","--secret","--v=2"],"livenessProbe":{"httpGet":{"httpHeaders":[{"name":"Authorization","value":"REMOVED"}]}}}]}}}}`)
	if d := cmp.Diff(want, o); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func TestTrim(t *testing.T) {
	pod := parse(t, `{"kind":"Pod","metadata":{"name":"web","labels":{"a":"b"}},"spec":{"nodeName":"n1","serviceAccountName":"s","volumes":[{"name":"hidden"}],
		"containers":[{"name":"c","image":"hidden","command":["hidden"],"ports":[{"containerPort":80}]}]},"status":{"phase":"Running","podIPs":[{"ip":"10.0.0.1"}],"message":"hidden"}}`)
	text, err := json.Marshal(Trim(pod))
	if err != nil || strings.Contains(string(text), "hidden") {
		t.Errorf("%s, %v", text, err)
	}
	for _, kept := range []string{"web", `"a":"b"`, "n1", "10.0.0.1", "Running", `"containerPort":80`} {
		if !strings.Contains(string(text), kept) {
			t.Errorf("%s isn't kept: %s", kept, text)
		}
	}
}

func TestScrub(t *testing.T) {
	const jwt = "eyJhbGciOiJSUzI1NiIsImtpZCI6Ii.eyJpc3MiOiJrdWJlcm5ldGVz.c2lnbmF0dXJl-_x"
	for text, want := range map[string]string{
		"GET / Authorization: Bearer " + jwt + " HTTP/1.1": "GET / Authorization: Bearer REMOVED HTTP/1.1",
		"authorization: bearer abcdefgh12345678":           "authorization: bearer REMOVED",
		"a token " + jwt + ".":                             "a token REMOVED.",
		`{"password": "hunter22", "user": "x"}`:            `{"password": "REMOVED", "user": "x"}`,
		"OS_PASSWORD=hunter22 OS_USER=x":                   "OS_PASSWORD=REMOVED OS_USER=x",
		"password=hunter22;user=x":                         "password=REMOVED;user=x",
		"https://user:hunter22@keystone:5000/v3":           "https://user:REMOVED@keystone:5000/v3",
		"http://10.0.0.1:9384/metrics":                     "http://10.0.0.1:9384/metrics",
		"the bearer of bad news":                           "the bearer of bad news",
		"token: nothing is known":                          "token: REMOVED is known",
		"route to fd00::1 dev veth0 table 116":             "route to fd00::1 dev veth0 table 116",
	} {
		if got := Scrub(text); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

func TestNodes(t *testing.T) {
	var all []string
	for i := range 9 {
		all = append(all, fmt.Sprint("n", 9-i))
	}
	found := []health.Finding{{Kind: "Node", Name: "n8"}, {Kind: "Egress", Name: "n7"}, {Kind: "Node", Name: "gone"}}
	for _, c := range []struct {
		asked           string
		most            int
		chosen, missing string
	}{
		{"", 3, "n1 n2 n8", ""},
		{"", 50, "n1 n2 n3 n4 n5 n6 n7 n8 n9", ""},
		{"", 0, "", ""},
		{"n9 n3 n9 x", 1, "n3 n9", "x"},
		{"x x", 1, "", "x"},
	} {
		chosen, missing := Nodes(all, found, strings.Fields(c.asked), c.most)
		if strings.Join(chosen, " ") != c.chosen || strings.Join(missing, " ") != c.missing {
			t.Errorf("%+v: %q, %q", c, chosen, missing)
		}
	}
	if all[0] != "n9" {
		t.Errorf("the list was changed: %q", all)
	}
}
