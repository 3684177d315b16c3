// Command coil-routers is coil-router and coil-egress in one file, as the image has it: most of each is what both link.
// It runs the program by whose name it is called.
package main

import (
	"os"

	"github.com/coil-net/coil/pkg/app/egress"
	"github.com/coil-net/coil/pkg/app/program"
	"github.com/coil-net/coil/pkg/app/router"
)

func main() {
	os.Exit(program.Joined{
		"coil-egress": egress.Main,
		"coil-router": router.Main,
	}.Main(os.Args))
}
