// Command coil-lb-agent makes a machine outside of the cluster a gateway by which clients reach Services. See README.md.
package main

import (
	"os"

	"github.com/coil-net/coil/pkg/app/lbagent"
)

func main() { os.Exit(lbagent.Main(os.Args[1:])) }
