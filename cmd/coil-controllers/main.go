// Command coil-controllers is coil-ipam-controller, coil-egress-controller and coil-lb-controller in one file, for the image: these programs
// link mostly the same packages. The name under which the file is called chooses the program.
package main

import (
	"os"

	"github.com/coil-net/coil/pkg/app/egresscontroller"
	"github.com/coil-net/coil/pkg/app/ipamcontroller"
	"github.com/coil-net/coil/pkg/app/lbcontroller"
	"github.com/coil-net/coil/pkg/app/program"
)

func main() {
	os.Exit(program.Joined{
		"coil-ipam-controller":   ipamcontroller.Main,
		"coil-egress-controller": egresscontroller.Main,
		"coil-lb-controller":     lbcontroller.Main,
	}.Main(os.Args))
}
