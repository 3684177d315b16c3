package openstack

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/gophercloud/gophercloud/v2"
)

// answered is an error of gophercloud for an answer.
func answered(code int, path, body string, headers ...string) error {
	e := gophercloud.ErrUnexpectedResponseCode{Method: "GET", URL: "http://cloud" + path, Actual: code, Body: []byte(body), ResponseHeader: http.Header{}}
	for i := 0; i < len(headers); i += 2 {
		e.ResponseHeader.Set(headers[i], headers[i+1])
	}
	return e
}

func neutron(kind, message string) string {
	return `{"NeutronError": {"type": "` + kind + `", "message": "` + message + `", "detail": ""}}`
}

// TestExplain has answers of Neutron 21 and Keystone 22, and of what is before them.
func TestExplain(t *testing.T) {
	const ports, login = "/v2.0/ports", "/v3/auth/tokens"
	for _, tt := range []struct {
		name   string
		err    error
		reason Reason
		text   string
		after  time.Duration
	}{
		{"quota", answered(409, ports, neutron("OverQuota", "Quota exceeded for resources: ['port'].")), QuotaExceeded,
			"do it: Quota exceeded for resources: ['port']. (409 OverQuota)", 0},
		{"subnet full", answered(409, ports, neutron("IpAddressGenerationFailure", "No more IP addresses available on network x.")), AddressesExhausted,
			"do it: No more IP addresses available on network x. (409 IpAddressGenerationFailure)", 0},
		{"no IPv4", answered(400, ports, neutron("ExternalIpAddressExhausted", "none")), AddressesExhausted, "do it: none (400 ExternalIpAddressExhausted)", 0},
		{"pairs", answered(400, ports, neutron("AllowedAddressPairExhausted", "The number of allowed address pair exceeds the maximum 10.")), TooManyPairs,
			"do it: The number of allowed address pair exceeds the maximum 10. (400 AllowedAddressPairExhausted)", 0},
		{"revision", answered(412, ports, neutron("RevisionNumberConstraintFailed", "Constrained to 1, but current revision is 2")), Changed,
			"do it: Constrained to 1, but current revision is 2 (412 RevisionNumberConstraintFailed)", 0},
		{"in use", answered(409, ports, neutron("FloatingIPPortAlreadyAssociated", "in use")), Conflict, "do it: in use (409 FloatingIPPortAlreadyAssociated)", 0},
		{"policy", answered(403, ports, neutron("PolicyNotAuthorized", "rule:create_port is disallowed by policy")), Forbidden,
			"do it: rule:create_port is disallowed by policy (403 PolicyNotAuthorized)", 0},
		{"gone", answered(404, ports, neutron("PortNotFound", "Port x could not be found.")), NotFound, "do it: Port x could not be found. (404 PortNotFound)", 0},
		{"attribute", answered(400, ports, `{"NeutronError": "Unrecognized attribute(s) 'x'"}`), BadRequest, "do it: Unrecognized attribute(s) 'x' (400)", 0},
		{"token", answered(401, ports, `{"error": {"code": 401, "title": "Unauthorized", "message": "The request you have made requires authentication."}}`), AuthFailed,
			"do it: The request you have made requires authentication. (401)", 0},
		{"password", answered(401, login, `{"error":{"code":401,"message":"The request you have made requires authentication.","title":"Unauthorized"}}`), AuthFailed,
			"do it: The request you have made requires authentication. (401)", 0},
		{"credential", answered(404, login, `{"error":{"code":404,"message":"Could not find Application Credential: x.","title":"Not Found"}}`), AuthFailed,
			"do it: Could not find Application Credential: x. (404)", 0},
		{"project disabled", answered(403, login, `{"error":{"code":403,"message":"Project is disabled"}}`), AuthFailed, "do it: Project is disabled (403)", 0},
		{"rate limit", answered(429, ports, "slow\n  down", "Retry-After", "7"), Temporary, "do it: slow down (429)", 7 * time.Second},
		{"proxy", answered(503, ports, "<html>\n<body>No server</body>\n</html>", "Retry-After", "never"), Temporary, "do it: <html> <body>No server</body> </html> (503)", 0},
		{"long page", answered(502, ports, strings.Repeat("ö", 300)), Temporary, "do it: " + strings.Repeat("ö", 200) + "… (502)", 0},
		{"empty", answered(500, ports, ""), Temporary, "do it: the answer has no text (500)", 0},
		{"other JSON", answered(418, ports, `{"NeutronError": 7}`), BadRequest, `do it: {"NeutronError": 7} (418)`, 0},
		{"connection", errors.New("connection refused"), Temporary, "do it: connection refused", 0},
		{"login refused again", &gophercloud.ErrUnableToReauthenticate{ErrOriginal: answered(401, ports, "x"), ErrReauth: answered(404, login, "gone")}, AuthFailed,
			"do it: log in again: gone (404)", 0},
		{"no login for now", &gophercloud.ErrUnableToReauthenticate{ErrOriginal: answered(401, ports, "x"), ErrReauth: answered(503, login, "busy", "Retry-After", "3")}, Temporary,
			"do it: log in again: busy (503)", 3 * time.Second},
		{"no Keystone", &gophercloud.ErrUnableToReauthenticate{ErrOriginal: answered(401, ports, "x"), ErrReauth: errors.New("connection refused")}, Temporary,
			"do it: log in again: connection refused", 0},
		{"after the login", &gophercloud.ErrErrorAfterReauthentication{ErrOriginal: answered(401, ports, "still")}, AuthFailed, "do it: still (401)", 0},
		{"no Neutron", &gophercloud.ErrEndpointNotFound{}, Misconfigured, "do it: No suitable endpoint could be found in the service catalog.", 0},
	} {
		err := explain("do it", tt.err)
		e := new(Error)
		if !errors.As(err, &e) || e.Reason != tt.reason || e.Error() != tt.text || e.RetryAfter != tt.after {
			t.Errorf("%s: %s %q after %s; want %s %q after %s", tt.name, ReasonOf(err), err, e.RetryAfter, tt.reason, tt.text, tt.after)
		}
		if again := explain("do more", err); again != err {
			t.Errorf("%s: it is explained twice: %v", tt.name, again)
		}
	}
	if err := explain("do it", context.Canceled); !errors.Is(err, context.Canceled) {
		t.Errorf("%v doesn't say that it was cancelled", err)
	}
	if err := explain("do it", nil); err != nil || ReasonOf(nil) != "" {
		t.Errorf("no error becomes %v", err)
	}
}

func FuzzSaid(f *testing.F) {
	f.Add([]byte(neutron("OverQuota", "Quota exceeded")))
	f.Add([]byte(`{"error": {"message": "no"}}`))
	f.Add([]byte("<html>"))
	f.Fuzz(func(t *testing.T, body []byte) {
		if _, message := said(body); message == "" {
			t.Errorf("nothing is said of %q", body)
		}
	})
}
