#!/usr/bin/env bash
# go vet, staticcheck with the checks below, and a syntax check of the shell
# scripts. Arguments are the packages; the default is all of them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=hack/lib.sh
source hack/lib.sh

(($#)) || set -- ./...

# All of SA (bugs), S (simplifications) and U (unused code); of ST (style) those
# that the conventions of this repository ask for:
#   ST1001 no dot imports              ST1005 the form of error texts
#   ST1006 no receiver "self", "this"  ST1008 errors are returned last
#   ST1011 no unit in the name of a time.Duration
#   ST1012 error variables are errX    ST1013 names instead of HTTP status numbers
#   ST1016 one receiver name per type  ST1017 no Yoda conditions
#   ST1018 no control characters       ST1019 nothing imported twice
# and of QF (quick fixes) none. integration/arch checks the doc comments.
checks='SA*,S1*,U1000,ST1001,ST1005,ST1006,ST1008,ST1011,ST1012,ST1013,ST1016,ST1017,ST1018,ST1019'

export GOBIN=$PWD/bin
# As the programs are built.
export CGO_ENABLED=0
mkdir -p "$GOBIN"
install_tool honnef.co/go/tools/cmd/staticcheck

while IFS= read -r script; do
  bash -n "$script"
done < <(git ls-files --cached --others --exclude-standard '*.sh' .ci/run)

# Generated code isn't ours to restyle; vet and the compiler see it all the same.
mapfile -t own < <(go list "$@" | grep -v "^$MODULE/generated/")
go vet "$@"
"$GOBIN/staticcheck" -checks "$checks" "${own[@]}"
# Programs of tests whose tunnels aren't FoU have other files in these.
mapfile -t standin < <(grep -lr --include='*.go' '^//go:build coil_vxlan$' pkg | xargs -rn1 dirname | sort -u | sed 's|^|./|')
go vet -tags coil_vxlan "${standin[@]}"
"$GOBIN/staticcheck" -tags coil_vxlan -checks "$checks" "${standin[@]}"
