package program

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Joined are programs that are in one file, by their names.
type Joined map[string]func(args []string) int

// Main runs the program that has the base name of args[0], and returns its exit code; 2 if there is none. args are those
// of the process (os.Args).
func (j Joined) Main(args []string) int {
	if len(args) > 0 {
		if main, ok := j[filepath.Base(args[0])]; ok {
			return main(args[1:])
		}
	}
	fmt.Fprintf(os.Stderr, "call this file by one of the names %s\n", strings.Join(slices.Sorted(maps.Keys(j)), ", "))
	return 2
}
