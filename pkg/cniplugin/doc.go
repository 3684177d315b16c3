// Package cniplugin does the commands of the CNI plugin coil: it turns environment and standard input
// into one gRPC call of coild, and the answer into a CNI result or error.
//
// It owns the words of CNI towards the runtime, the deadline of each command, and what
// happens when coild can't be reached. It must not know how an address is assigned or
// a pod is wired, and links nothing that slows the start of the process: no grpc-go,
// net/http, protobuf or klog.
package cniplugin
