// Command coilctl shows operators what Coil does in a cluster. Under the name kubectl-coil it is also the command "kubectl coil".
package main

import (
	"os"

	"github.com/coil-net/coil/pkg/app/coilctl"
)

func main() { os.Exit(coilctl.Main(os.Args, os.Stdin, os.Stdout, os.Stderr)) }
