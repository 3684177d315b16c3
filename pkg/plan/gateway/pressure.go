package gateway

// Pressure is how many of its connections and ports a router uses. Routers answer with it, as JSON,
// at PressurePath of their metrics port.
type Pressure struct {
	// Connections are the connections that the router tracks, of MaxConnections.
	Connections    int `json:"connections"`
	MaxConnections int `json:"maxConnections"`
	// Ports are the ports of the router's address that are used towards Destination, which has
	// the most, of MaxPorts.
	Ports       int    `json:"ports"`
	MaxPorts    int    `json:"maxPorts"`
	Destination string `json:"destination,omitempty"`
	// Limited is how many addresses of clients were refused connections lately, since each has as
	// many as the router lets it have, and Client is one of them.
	Limited int    `json:"limited,omitempty"`
	Client  string `json:"client,omitempty"`
}

// PressurePath is where routers answer with their Pressure.
const PressurePath = "/pressure"

// SourcePorts is how many source ports the kernel chooses from for translated flows:
// 1024 to 65535.
const SourcePorts = 64512
