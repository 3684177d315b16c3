// Package protocol is what the lab and the program vminit, PID 1 of its virtual machines, say to
// each other: over one virtio port in JSON, first vminit's Up, then the lab's Spec, vminit's Exit, and at last
// the lab's Received. It knows nothing of how either of them works.
package protocol

// Names of the virtio ports.
const (
	Control = "coil-lab.control"
	Stdin   = "coil-lab.stdin"
	Stdout  = "coil-lab.stdout"
	Stderr  = "coil-lab.stderr"
)

// MountTag is that of the 9p share with the host's root directory.
const MountTag = "host"

// ModuleDir of the initramfs has the kernel modules that are needed before the host's files can
// be seen, named so that their order is that of loading.
const ModuleDir = "/modules"

// DiskDevice has a file system of type ext4.
const DiskDevice = "/dev/vda"

// Up says that the kernel has booted.
type Up struct {
	Release string // of the kernel
}

// Spec is the command to run, with the host's paths.
type Spec struct {
	Args    []string
	Env     []string
	Dir     string
	Modules string // the kernel's modules, to be mounted on /lib/modules
	// Init is a program that takes vminit's place as PID 1, with its arguments. The command then runs beside it, and the
	// machine loses its power when the command ends.
	Init []string
	// Disk says that the machine has DiskDevice, which takes the changes.
	Disk bool
}

// Exit is how it ended. Error is set when the command was not run at all.
type Exit struct {
	Status int
	Error  string
	// Stdout and Stderr are how many bytes the command wrote.
	Stdout, Stderr int64
}

// Received says that the lab has the whole output of the command. Data in a virtio port is lost at power-off: a write returns
// before the host takes it (drivers/char/virtio_console.c, port_fops_write).
type Received struct{}
