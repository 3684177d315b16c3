#!/usr/bin/env bash
# Compiles every package, and the programs into build/bin: static, as in the image.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

go build ./...
mkdir -p build/bin
CGO_ENABLED=0 go build -trimpath -ldflags='-s -w' -o build/bin/ ./cmd/...
