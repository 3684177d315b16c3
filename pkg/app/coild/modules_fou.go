//go:build !coil_vxlan

package coild

// fouModules are the modules that tunnels need. Nothing else loads the first two.
var fouModules = []string{"fou", "fou6", "ipip", "ip6_tunnel"}
