package testkit

import (
	"net"
	"testing"
)

// FreeAddr is an address of the loopback with a TCP port at which nobody listens: connections to it are refused.
func FreeAddr(tb testing.TB) string {
	tb.Helper()
	l := Must(net.Listen("tcp", "127.0.0.1:0"))(tb)
	defer l.Close()
	return l.Addr().String()
}

// FreeUDPPort is a UDP port that nobody has at any address of IPv4.
func FreeUDPPort(tb testing.TB) int {
	tb.Helper()
	conn := Must(net.ListenPacket("udp4", "0.0.0.0:0"))(tb)
	defer conn.Close()
	return conn.LocalAddr().(*net.UDPAddr).Port
}
