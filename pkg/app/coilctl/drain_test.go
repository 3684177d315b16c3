package coilctl_test

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/coil-net/coil/pkg/plan/drain"
)

// An API server that is updated while pods are moved is waited for: what it hasn't answered isn't refused.
func TestDrainUnanswered(t *testing.T) {
	w := newWorld(t)
	w.add(t, "addresspools", object{"metadata": object{"name": "blue", "generation": 2}, "spec": object{"drain": true, "blockSizeBits": 2, "subnets": []object{{"ipv4": "10.0.0.0/24"}}}})
	w.add(t, "addressblocks", object{"metadata": object{"name": "blue-0", "labels": object{"coil.cybozu.com/pool": "blue", "coil.cybozu.com/node": "n1"}}, "ipv4": "10.0.0.0/30"})
	w.add(t, "namespaces", object{"metadata": object{"name": "shop"}})
	w.add(t, "pods", object{
		"metadata": object{"name": "web", "namespace": "shop", "ownerReferences": []object{{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web", "uid": "u", "controller": true}}},
		"spec":     object{"nodeName": "n1"}, "status": object{"phase": "Running", "podIPs": []object{{"ip": "10.0.0.1"}}},
	})
	var asked, away atomic.Int32
	w.sub = func(out http.ResponseWriter, _ *http.Request, pod, _ string) {
		if asked.Add(1) == 1 {
			panic(http.ErrAbortHandler)
		}
		w.mu.Lock()
		w.objects["pods"] = slices.DeleteFunc(w.objects["pods"], func(o object) bool { return metaOf(o)["name"] == pod })
		w.objects["addressblocks"] = nil
		w.objects["addresspools"][0]["status"] = object{"conditions": []object{{"type": "Drained", "status": "True", "reason": "NoBlocks", "message": "m", "lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 2}}}
		w.mu.Unlock()
		away.Store(2)
		answer(out, http.StatusCreated, object{"kind": "Status", "apiVersion": "v1", "status": "Success"})
	}
	w.before = func(out http.ResponseWriter, r request) bool {
		refuses := r.resource == "addresspools" && away.Add(-1) >= 0
		if refuses {
			status(out, http.StatusServiceUnavailable, "ServiceUnavailable", "shutting down")
		}
		return refuses
	}
	code, out, errOut := w.coilctl("", "pools", "drain", "blue", "--follow", "--yes")
	if code != 0 || !strings.HasSuffix(out, "Moved shop/web from node n1, 1 of 1\nWaits: read AddressPool blue: shutting down\nAddressPool blue is drained; 1 pod was moved\n") ||
		!strings.Contains(out, "Pod shop/web of node n1 waits: ") {
		t.Errorf("exit code %d\n%s%s", code, out, errOut)
	}
}

// Beside JSON, sentences and the question go to standard error.
func TestDrainAsJSON(t *testing.T) {
	w := newWorld(t)
	w.add(t, "addresspools", object{"metadata": object{"name": "blue", "generation": 2}, "spec": object{"blockSizeBits": 2, "subnets": []object{{"ipv4": "10.0.0.0/24"}}}})
	code, out, errOut := w.coilctl("n\n", "pools", "drain", "blue", "-o", "json")
	var p drain.Plan
	if err := json.Unmarshal([]byte(out), &p); err != nil || code != 1 {
		t.Errorf("exit code %d, error %v of %s", code, err, out)
	}
	if !strings.HasPrefix(errOut, "Have AddressPool blue give nothing new? [y/N] ") || !strings.Contains(errOut, "nothing was changed") {
		t.Errorf("standard error is %q", errOut)
	}
}
