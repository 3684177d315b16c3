// Command coil-router gives a node routes to the pods of all other nodes of its
// flat L2 network.
package main

import (
	"os"

	"github.com/coil-net/coil/pkg/app/router"
)

func main() { os.Exit(router.Main(os.Args[1:])) }
