//go:build coil_vxlan

package coild

// fouModules are none: tunnels are of VXLAN, which each kernel of the tests has.
var fouModules []string
