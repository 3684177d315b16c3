// Command coild is the node daemon of Coil: it gives addresses to the pods of a
// node, wires them, and exports the routes of the node's blocks.
package main

import (
	"os"

	"github.com/coil-net/coil/pkg/app/coild"
)

func main() { os.Exit(coild.Main(os.Args[1:])) }
