// Command coil-controllers is coil-ipam-controller and coil-egress-controller in one file, as the image has it: most of
// each is what both link. It runs the program by whose name it is called.
package main

import (
	"os"

	"github.com/coil-net/coil/pkg/app/egresscontroller"
	"github.com/coil-net/coil/pkg/app/ipamcontroller"
	"github.com/coil-net/coil/pkg/app/program"
)

func main() {
	os.Exit(program.Joined{
		"coil-ipam-controller":   ipamcontroller.Main,
		"coil-egress-controller": egresscontroller.Main,
	}.Main(os.Args))
}
