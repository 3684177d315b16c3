# Shared by the scripts of this folder.
MODULE=github.com/coil-net/coil

# require PROGRAM PACKAGE: ends the script when PROGRAM is missing, and says
# which Debian package has it.
require() {
  command -v "$1" >/dev/null || {
    echo "$1 is missing: apt-get install $2" >&2
    exit 1
  }
}

# install_tool PACKAGE: builds a tool, at the version that hack/tools/go.mod
# pins, into $GOBIN.
install_tool() {
  (cd hack/tools && go install "$1")
}
