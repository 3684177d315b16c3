package unary

import "strconv"

// Code is a status code of gRPC. google.golang.org/grpc/codes has them too, but it
// links grpc's loggers.
type Code uint32

// The codes that the plugin knows; see
// https://github.com/grpc/grpc/blob/master/doc/statuscodes.md.
const (
	OK                Code = 0
	Canceled          Code = 1
	Unknown           Code = 2
	DeadlineExceeded  Code = 4
	PermissionDenied  Code = 7
	ResourceExhausted Code = 8
	Unimplemented     Code = 12
	Internal          Code = 13
	Unavailable       Code = 14
	Unauthenticated   Code = 16
)

var codeNames = [...]string{
	"OK", "Canceled", "Unknown", "InvalidArgument", "DeadlineExceeded", "NotFound", "AlreadyExists",
	"PermissionDenied", "ResourceExhausted", "FailedPrecondition", "Aborted", "OutOfRange",
	"Unimplemented", "Internal", "Unavailable", "DataLoss", "Unauthenticated",
}

func (c Code) String() string {
	if int64(c) < int64(len(codeNames)) {
		return codeNames[c]
	}
	return "Code(" + strconv.FormatUint(uint64(c), 10) + ")"
}
