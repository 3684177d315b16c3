// Command coilctl shows operators what Coil does in a cluster. kubectl runs it as "kubectl coil" under the name kubectl-coil.
package main

import (
	"os"

	"github.com/coil-net/coil/pkg/app/coilctl"
)

func main() { os.Exit(coilctl.Main(os.Args, os.Stdin, os.Stdout, os.Stderr)) }
