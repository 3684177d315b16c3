// Command coil-ipam-controller gives blocks of addresses to nodes and keeps
// AddressPools. See README.md.
package main

import (
	"os"

	"github.com/coil-net/coil/pkg/app/ipamcontroller"
)

func main() { os.Exit(ipamcontroller.Main(os.Args[1:])) }
