// Program coil is the CNI plugin of Coil; see README.md.
package main

import (
	"os"

	"github.com/coil-net/coil/pkg/app/coil"
)

func main() { os.Exit(coil.Main(os.Args[1:])) }
