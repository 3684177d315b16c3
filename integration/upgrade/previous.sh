#!/usr/bin/env bash
# Makes a commit or tag of this repository the previous version: previous.sh v3.0.0. The sources of its programs and its
# manifests are kept beside this script, because a checkout may lack the history.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
revision=$(git rev-parse --short=7 --verify "${1:?the commit or tag is missing}^{commit}")
root=$(git rev-parse --show-toplevel)
git -C "$root" ls-tree -r --name-only "$revision" |
  grep -Ev '_test\.go$|/testdata/|\.md$|^pkg/testkit/|^hack/tools/' |
  awk '!/^integration\// || /^integration\/lab\/manifests\// {print}' |
  xargs git -C "$root" archive "$revision" -- | gzip -9n >previous.tar.gz
echo "$revision" >previous
