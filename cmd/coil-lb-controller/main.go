// Command coil-lb-controller gives Services of the type LoadBalancer addresses that are on nodes. See README.md.
package main

import (
	"os"

	"github.com/coil-net/coil/pkg/app/lbcontroller"
)

func main() { os.Exit(lbcontroller.Main(os.Args[1:])) }
