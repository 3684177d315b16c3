#!/usr/bin/env bash
# Checks that generated code is what the generators make of the sources, that
# the modules are tidy and that the code is formatted. It changes nothing, names
# all that is wrong with the command that mends it, and fails if anything is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

failed=0
# wrong PROBLEM FIX: reports what is wrong.
wrong() {
  printf '\n%s\n  mend it by: %s\n' "$1" "$2" >&2
  failed=1
}

generated=(pkg/apis generated manifests/crd)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
for path in "${generated[@]}" hack go.mod go.sum; do
  mkdir -p "$tmp/$(dirname "$path")"
  cp -R "$path" "$tmp/$path"
done
# The copy uses the tools that this tree has built already.
if ! GOBIN=$PWD/bin "$tmp/hack/update-codegen.sh" >"$tmp/log" 2>&1; then
  cat "$tmp/log" >&2
  wrong "The generators fail; their output is above." "correct the sources, then hack/update-codegen.sh"
else
  for path in "${generated[@]}"; do
    diff -Naupr "$path" "$tmp/$path" >&2 ||
      wrong "$path differs from what is generated." hack/update-codegen.sh
  done
fi

unmarked=$(find generated -name '*.go' -exec grep -L 'DO NOT EDIT' {} +)
[[ -z $unmarked ]] ||
  wrong "Files under generated/ that no generator made:"$'\n'"$unmarked" "git mv them to pkg/"

unformatted=$(gofmt -l cmd pkg generated integration hack)
[[ -z $unformatted ]] ||
  wrong "Files that aren't formatted:"$'\n'"$unformatted" "gofmt -w ${unformatted//$'\n'/ }"

for module in . hack/tools; do
  (cd "$module" && go mod tidy -diff) >&2 ||
    wrong "The module in $module isn't tidy." "(cd $module && go mod tidy)"
done

exit $failed
