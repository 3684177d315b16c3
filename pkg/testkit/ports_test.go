package testkit

import (
	"net"
	"strconv"
	"testing"
)

func TestFreePorts(t *testing.T) {
	Must(net.Listen("tcp", FreeAddr(t)))(t).Close()
	Must(net.ListenPacket("udp4", "127.0.0.2:"+strconv.Itoa(FreeUDPPort(t))))(t).Close()
}
