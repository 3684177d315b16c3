// Program coil-installer puts the CNI plugin on the node; see README.md.
package main

import (
	"os"

	"github.com/coil-net/coil/pkg/app/installer"
)

func main() { os.Exit(installer.Main(os.Args[1:])) }
