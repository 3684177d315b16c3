// Command coil-egress makes the pod that it runs in a NAT router of an Egress.
package main

import (
	"os"

	"github.com/coil-net/coil/pkg/app/egress"
)

func main() { os.Exit(egress.Main(os.Args[1:])) }
