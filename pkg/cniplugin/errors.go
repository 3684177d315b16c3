package cniplugin

import (
	"errors"
	"fmt"
	"strings"

	"github.com/coil-net/coil/pkg/cniconf/spec"
	"github.com/coil-net/coil/pkg/cniplugin/unary"
)

// hint tells an admin where to look when coild doesn't answer.
const hint = "see kubectl -n kube-system get pods -l app.kubernetes.io/component=coild"

// toCNIError says in CNI's words why a call of coild failed:
//
//	no connection, or it broke          11 (try again later)
//	a CNIError in the status' details   its own code, message and details; 999 for
//	                                    a code that CNI doesn't have
//	Unavailable, DeadlineExceeded,      11
//	Canceled
//	Unimplemented                       999, coild is of another version
//	any other status                    999
//
// STATUS answers 50 (plugin not available) wherever others answer 11: those are its
// words for "can't serve ADD" in the CNI specification.
func toCNIError(v verb, socket string, err error) *spec.Error {
	e := classify(v, socket, err)
	if v == verbStatus && e.Code == spec.CodeTryAgainLater {
		e.Code = spec.CodeNotAvailable
	}
	return e
}

func classify(v verb, socket string, err error) *spec.Error {
	var ce *unary.ConnectError
	if errors.As(err, &ce) {
		return spec.NewError(spec.CodeTryAgainLater,
			fmt.Sprintf("coild is not reachable at %s: %v; it is probably starting or being updated; %s", socket, ce, hint), "")
	}
	var s *unary.Status
	if !errors.As(err, &s) {
		return spec.NewError(spec.CodeInternal, err.Error(), "")
	}
	if e, ok := findCNIError(s.Details); ok {
		return spec.NewError(codeOf(e.code), orUnknown(e.msg, s), e.details)
	}
	message := strings.ToValidUTF8(s.Error(), "�")
	switch {
	case s.Code == unary.DeadlineExceeded:
		return spec.NewError(spec.CodeTryAgainLater, fmt.Sprintf("coild did not answer %s in time; %s", v, hint), message)
	case s.Code == unary.Unavailable && !s.FromServer:
		return spec.NewError(spec.CodeTryAgainLater,
			fmt.Sprintf("coild at %s broke off %s: it is probably being restarted or updated; %s", socket, v, hint), message)
	case s.Code == unary.Unavailable, s.Code == unary.Canceled:
		return spec.NewError(spec.CodeTryAgainLater, "coild is not available: "+orUnknown(strings.ToValidUTF8(s.Message, "�"), s), "")
	case s.Code == unary.Unimplemented:
		return spec.NewError(spec.CodeInternal,
			fmt.Sprintf("coild at %s does not know %s: it is of another version than the plugin, or another program; %s", socket, v, hint), message)
	}
	return spec.NewError(spec.CodeInternal, fmt.Sprintf("coild failed %s: %s", v, message), "")
}

// codeOf maps a code of CNIError. A message without a code has 0, and the
// runtime would take 0 for no error.
func codeOf(code int32) uint {
	if code <= 0 {
		return spec.CodeInternal
	}
	return uint(code)
}

func orUnknown(msg string, s *unary.Status) string {
	if msg == "" {
		return "coild gave no reason (" + s.Code.String() + ")"
	}
	return msg
}

// lost tells whether a call may not have reached coild and nobody said otherwise:
// there was no connection, or it broke before an answer came. A coild that answers,
// or is too slow to, isn't lost.
func lost(err error) bool {
	if errors.As(err, new(*unary.ConnectError)) {
		return true
	}
	var s *unary.Status
	return errors.As(err, &s) && !s.FromServer && s.Code == unary.Unavailable
}
