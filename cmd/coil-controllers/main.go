// Command coil-controllers is coil-ipam-controller and coil-egress-controller in one file, for the image: both programs
// link mostly the same packages. The name under which the file is called chooses the program.
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
