package rtnl

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// ClearAlias asks for a link to have no alias.
func ClearAlias(index int) Request {
	var e encoder
	e.ifInfo(index, 0, 0)
	e.attr(unix.IFLA_IFALIAS, nil)
	return Request{unix.RTM_SETLINK, 0, e.b, func() string { return fmt.Sprintf("link set %d alias \"\"", index) }}
}
