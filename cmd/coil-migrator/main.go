// Command coil-migrator moves a cluster from Coil v1 to this version. It runs on an administrator's machine.
package main

import (
	"os"

	"github.com/coil-net/coil/pkg/app/migrator"
)

func main() { os.Exit(migrator.Main(os.Args[1:])) }
