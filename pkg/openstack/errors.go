package openstack

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/gophercloud/gophercloud/v2"
)

// Reason is why the cloud didn't do what it was asked for, in a word that fits into a condition.
type Reason string

// The reasons, and what helps.
const (
	// QuotaExceeded says that the project may have no more of these objects: delete some, or have the quota raised.
	QuotaExceeded Reason = "QuotaExceeded"
	// AddressesExhausted says that a subnet, or the network of floating IPs, has no free address.
	AddressesExhausted Reason = "AddressesExhausted"
	// AuthFailed says that the credentials are refused: they were deleted, have expired, or are wrong. The file is read again by the next call.
	AuthFailed Reason = "AuthFailed"
	// NotFound says that something that was named isn't there, or isn't for this project to see.
	NotFound Reason = "NotFound"
	// Forbidden says that the cloud's rules forbid it to this user, such as address pairs on a network of another project.
	Forbidden Reason = "Forbidden"
	// BadRequest says that the cloud doesn't understand, or won't have it so.
	BadRequest Reason = "BadRequest"
	// Conflict says that something else stands against it, such as a floating IP of somebody else on the port.
	Conflict Reason = "Conflict"
	// Changed says that somebody else has changed the object at the same time. To try again helps.
	Changed Reason = "Changed"
	// TooManyPairs says that a port can't have so many address pairs.
	TooManyPairs Reason = "TooManyPairs"
	// Temporary says that the cloud, or the way to it, doesn't work now. To try again helps, after RetryAfter.
	Temporary Reason = "Temporary"
	// Misconfigured says that the configuration doesn't fit itself, or the cloud.
	Misconfigured Reason = "Misconfigured"
)

// Error is what the cloud has refused, and why.
type Error struct {
	Reason Reason
	// Doing is what was to be done.
	Doing string
	// Code is that of the answer; 0 says that there was none. Type is Neutron's word for the error, if it has one.
	Code int
	Type string
	// Message is the cloud's own.
	Message string
	// RetryAfter is for how long the cloud wants to be left alone; 0 says that it hasn't told.
	RetryAfter time.Duration
	err        error
}

func (e *Error) Error() string {
	text := e.Message
	if e.Doing != "" {
		text = e.Doing + ": " + text
	}
	switch {
	case e.Code != 0 && e.Type != "":
		return fmt.Sprintf("%s (%d %s)", text, e.Code, e.Type)
	case e.Code != 0:
		return fmt.Sprintf("%s (%d)", text, e.Code)
	}
	return text
}

func (e *Error) Unwrap() error { return e.err }

// ReasonOf returns the reason of the first Error in err, or "".
func ReasonOf(err error) Reason {
	if e := new(Error); errors.As(err, &e) {
		return e.Reason
	}
	return ""
}

// explain makes an Error of what gophercloud has returned.
func explain(doing string, err error) error {
	if err == nil || errors.As(err, new(*Error)) {
		return err
	}
	e := &Error{Reason: Temporary, Doing: doing, Message: err.Error(), err: err}
	login := false
	// It hides the answer to the login, and stands for the one to the call, a 401, which says less.
	if again := new(gophercloud.ErrUnableToReauthenticate); errors.As(err, &again) {
		err, login = again.ErrReauth, true
		e.Doing, e.Message = doing+": log in again", err.Error()
	}
	if endpoint := new(gophercloud.ErrEndpointNotFound); errors.As(err, &endpoint) {
		e.Reason = Misconfigured
		return e
	}
	var answer gophercloud.ErrUnexpectedResponseCode
	if !errors.As(err, &answer) {
		// No answer: the connection, or the time. The URL is too long for a condition.
		if u := new(url.Error); errors.As(err, &u) {
			e.Message = "no answer to " + u.Op + ": " + u.Err.Error()
			if at, err := url.Parse(u.URL); err == nil {
				e.Message = "no answer from " + at.Host + ": " + u.Err.Error()
			}
		}
		return e
	}
	login = login || resource(answer.URL) == loginResource
	e.Code = answer.Actual
	e.Type, e.Message = said(answer.Body)
	e.RetryAfter = retryAfter(answer.ResponseHeader)
	e.Reason = reasonOf(e.Code, e.Type, login)
	return e
}

// reasonOf judges an answer.
func reasonOf(code int, kind string, login bool) Reason {
	switch kind {
	case "OverQuota":
		return QuotaExceeded
	case "IpAddressGenerationFailure", "ExternalIpAddressExhausted":
		return AddressesExhausted
	case "AllowedAddressPairExhausted":
		return TooManyPairs
	}
	switch code {
	case http.StatusUnauthorized:
		return AuthFailed
	case http.StatusForbidden, http.StatusNotFound:
		// A login with the ID of an application credential that was deleted is answered 404.
		if login {
			return AuthFailed
		}
		if code == http.StatusForbidden {
			return Forbidden
		}
		return NotFound
	case http.StatusConflict:
		return Conflict
	case http.StatusPreconditionFailed:
		return Changed
	case http.StatusRequestTimeout, http.StatusTooManyRequests, http.StatusRequestEntityTooLarge: // the last one was that of rate limits, too
		return Temporary
	}
	if code >= 500 {
		return Temporary
	}
	return BadRequest
}

// bodyLength is how many characters are told of a body that isn't JSON, such as a page of a proxy.
const bodyLength = 200

// said returns Neutron's word for an error and the message in the body of an answer: Neutron's, Keystone's, or else its beginning.
func said(body []byte) (kind, message string) {
	var b struct {
		Neutron json.RawMessage `json:"NeutronError"`
		Error   struct{ Message string }
	}
	if json.Unmarshal(body, &b) == nil {
		var n struct{ Type, Message, Detail string }
		switch {
		case json.Unmarshal(b.Neutron, &n) == nil && n.Message != "":
			return n.Type, strings.TrimSpace(n.Message + " " + n.Detail)
		case json.Unmarshal(b.Neutron, &message) == nil && message != "": // some errors of Neutron are a text only
			return "", message
		case b.Error.Message != "":
			return "", b.Error.Message
		}
	}
	text := []rune(strings.Join(strings.Fields(strings.ToValidUTF8(string(body), "")), " "))
	if len(text) > bodyLength {
		text = append(text[:bodyLength], '…')
	}
	if len(text) == 0 {
		return "", "the answer has no text"
	}
	return "", string(text)
}

// retryAfter reads the header of that name in both forms (RFC 9110, section 10.2.3).
func retryAfter(h http.Header) time.Duration {
	v := h.Get("Retry-After")
	if s, err := strconv.Atoi(v); err == nil && s > 0 {
		return min(time.Duration(s), 24*3600) * time.Second
	}
	if at, err := http.ParseTime(v); err == nil {
		return min(max(time.Until(at), 0), 24*time.Hour)
	}
	return 0
}
