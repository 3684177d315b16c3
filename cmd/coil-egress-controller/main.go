// Command coil-egress-controller makes routers of Egresses and tells them their
// clients. See README.md.
package main

import (
	"os"

	"github.com/coil-net/coil/pkg/app/egresscontroller"
)

func main() { os.Exit(egresscontroller.Main(os.Args[1:])) }
