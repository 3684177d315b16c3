package netlab

import "net"

// TakeID gives the next echo request of Ping the ID that the kernel chose for p.
func (p *Pinger) TakeID() { echoID.Store(uint32(p.conn.LocalAddr().(*net.UDPAddr).Port) - 1) }
