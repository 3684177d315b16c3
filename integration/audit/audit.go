// Package audit reads from an API server's audit log what programs asked for, and
// says what those that run on each node may list and watch.
//
// It owns the audit policy and that table. It must not know who runs the API server
// or the programs.
package audit

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Request is one request as the API server records it (audit.k8s.io/v1, Event).
type Request struct {
	AuditID    string
	Verb       string
	RequestURI string
	User       struct {
		Username string
		Groups   []string
	}
	ResponseStatus struct{ Code int }
}

// Log is the audit log of an API server, in a folder of its own.
type Log struct{ dir string }

// New prepares a log in a folder that exists, of the requests of ServiceAccounts of
// kube-system.
func New(dir string, accounts ...string) (Log, error) {
	l := Log{dir}
	var users []string
	for _, a := range accounts {
		users = append(users, User(a))
	}
	policy, err := json.Marshal(map[string]any{
		"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": []string{"RequestReceived"},
		"rules": []map[string]any{{"level": "Metadata", "users": users}},
	})
	if err != nil {
		return Log{}, err
	}
	return l, os.WriteFile(l.policy(), policy, 0o600)
}

// User is the name of a ServiceAccount of kube-system as a user.
func User(account string) string { return "system:serviceaccount:kube-system:" + account }

func (l Log) policy() string { return filepath.Join(l.dir, "policy.yaml") }
func (l Log) file() string   { return filepath.Join(l.dir, "log") }

// APIServerArgs are the flags of the API server that writes the log.
func (l Log) APIServerArgs() []string {
	return []string{"--audit-policy-file=" + l.policy(), "--audit-log-path=" + l.file()}
}

// Requests returns the requests of a ServiceAccount so far, each once; a watch is one
// from its begin on.
func (l Log) Requests(account string) ([]Request, error) {
	f, err := os.Open(l.file())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // nobody has asked for anything yet
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var rs []Request
	seen := map[string]bool{}
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var r Request
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			continue // the line that is being written
		}
		if r.User.Username == User(account) && !seen[r.AuditID] {
			seen[r.AuditID] = true
			rs = append(rs, r)
		}
	}
	return rs, lines.Err()
}

// Path is what was asked for, without parameters.
func (r Request) Path() string {
	path, _, _ := strings.Cut(r.RequestURI, "?")
	return path
}

// Node stands for the name of a program's own node, and Namespace for that of any namespace.
const (
	Node      = "NODE"
	Namespace = "NAMESPACE"
)

var namespaced = regexp.MustCompile(`/namespaces/[^/]+/`)

// Subject is the resource that a request lists or watches, and the selector, in which
// NODE stands for the name of one of the nodes, NAMESPACE for that of a namespace. It is false for other requests.
func (r Request) Subject(nodes []string) (string, bool, error) {
	if r.Verb != "list" && r.Verb != "watch" {
		return "", false, nil
	}
	u, err := url.Parse(r.RequestURI)
	if err != nil {
		return "", false, fmt.Errorf("parse the URI of a request: %w", err)
	}
	subject := namespaced.ReplaceAllString(u.Path, "/namespaces/"+Namespace+"/")
	for _, key := range []string{"fieldSelector", "labelSelector"} {
		v := u.Query().Get(key)
		if v == "" {
			continue
		}
		if i := strings.LastIndexByte(v, '='); slices.Contains(nodes, v[i+1:]) {
			v = v[:i+1] + Node
		}
		subject += " " + key + "=" + v
	}
	return subject, true, nil
}

// Allowed is what a program of each node may list and watch, all of which it does. On
// a large cluster anything else would be too much.
func Allowed(account string) []string {
	return map[string][]string{
		"coild": {
			"/api/v1/nodes fieldSelector=metadata.name=NODE",
			"/api/v1/pods fieldSelector=spec.nodeName=NODE",
			"/api/v1/namespaces",
			"/apis/coil.cybozu.com/v2/addressblocks labelSelector=coil.cybozu.com/node=NODE",
			"/apis/coil.cybozu.com/v2/addressblocks labelSelector=coil.cybozu.com/floating=true",
			"/api/v1/namespaces/NAMESPACE/secrets fieldSelector=metadata.name=coil-floating",
			"/apis/coil.cybozu.com/v2/blockrequests labelSelector=coil.cybozu.com/node=NODE",
			"/apis/coil.cybozu.com/v2/egresses",
			"/apis/coil.cybozu.com/v2/egresspolicies",
			"/apis/coil.cybozu.com/v2/egressclusterpolicies",
			"/api/v1/services labelSelector=app.kubernetes.io/component=egress,app.kubernetes.io/name=coil",
			"/apis/discovery.k8s.io/v1/endpointslices labelSelector=app.kubernetes.io/component=egress,app.kubernetes.io/name=coil",
		},
		"coil-router": {
			"/api/v1/nodes",
			"/apis/coil.cybozu.com/v2/addressblocks",
		},
	}[account]
}

// allowedInPods are watches that a program of each node has in a pod, and doesn't have with a kubeconfig: coild watches which addresses the API servers have.
var allowedInPods = map[string][]string{
	"coild": {"/apis/discovery.k8s.io/v1/namespaces/" + Namespace + "/endpointslices labelSelector=kubernetes.io/service-name=kubernetes"},
}

// allowedOnce are lists that a program of each node may ask for now and then: coild asks for the policies of a pod that is added. It asks which floating
// addresses the node has when it ends, and when it isn't sure of them.
var allowedOnce = map[string][]string{
	"coild": {
		"/apis/coil.cybozu.com/v2/namespaces/" + Namespace + "/egresspolicies",
		"/apis/coil.cybozu.com/v2/addressblocks labelSelector=coil.cybozu.com/floating-holder=NODE",
	},
}

// May says whether a program of each node may list or watch something.
func May(account, subject string) bool {
	return slices.Contains(Allowed(account), subject) || slices.Contains(allowedInPods[account], subject) || slices.Contains(allowedOnce[account], subject)
}

// Problems says what a program lists or watches that it may not, and what it does not
// although it should, and which rights it lacks.
func Problems(account string, rs []Request, nodes []string) ([]string, error) {
	var problems []string
	// An API server that has just started forbids what it doesn't know yet to be
	// allowed: only what never was is missing.
	granted, forbidden := map[string]bool{}, map[string]bool{}
	seen := map[string]bool{}
	for _, r := range rs {
		if r.ResponseStatus.Code == 403 {
			forbidden[r.Verb+" "+r.Path()] = true
		} else {
			granted[r.Verb+" "+r.Path()] = true
		}
		subject, ok, err := r.Subject(nodes)
		if err != nil {
			return nil, err
		}
		if ok {
			seen[subject] = true
		}
	}
	for what := range forbidden {
		if !granted[what] {
			problems = append(problems, what+" was forbidden: a right is missing")
		}
	}
	for what := range seen {
		if !May(account, what) {
			problems = append(problems, "it lists or watches "+what)
		}
	}
	for _, what := range Allowed(account) {
		if !seen[what] {
			problems = append(problems, "it does not watch "+what)
		}
	}
	slices.Sort(problems)
	return problems, nil
}
