// Command coil-routers is coil-router, coil-egress and coil-lb-agent in one file, for the image: these programs link mostly the same
// packages. The name under which the file is called chooses the program.
package main

import (
	"os"

	"github.com/coil-net/coil/pkg/app/egress"
	"github.com/coil-net/coil/pkg/app/lbagent"
	"github.com/coil-net/coil/pkg/app/program"
	"github.com/coil-net/coil/pkg/app/router"
)

func main() {
	os.Exit(program.Joined{
		"coil-egress":   egress.Main,
		"coil-lb-agent": lbagent.Main,
		"coil-router":   router.Main,
	}.Main(os.Args))
}
