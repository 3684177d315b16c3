// Command empty is a CNI plugin that does nothing: what it costs to run it is the
// floor of every plugin.
package main

func main() {}
