#!/usr/bin/env bash
# Generates deepcopy functions and the registration of types beside the API,
# the clientset, listers and informers and the gRPC code under generated/, and
# the CRDs under manifests/crd. hack/verify.sh checks that nothing was forgotten.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=hack/lib.sh
source hack/lib.sh

require protoc protobuf-compiler
export GOBIN=${GOBIN:-$PWD/bin}
mkdir -p "$GOBIN"
install_tool sigs.k8s.io/controller-tools/cmd/controller-gen
install_tool google.golang.org/protobuf/cmd/protoc-gen-go
install_tool google.golang.org/grpc/cmd/protoc-gen-go-grpc

codegen=$(cd hack/tools && go mod download k8s.io/code-generator && go list -m -f '{{.Dir}}' k8s.io/code-generator)
# kube_codegen.sh builds its generators where KUBE_CODEGEN_ROOT says.
export KUBE_CODEGEN_ROOT=$codegen
# shellcheck source=/dev/null
source "$codegen/kube_codegen.sh"

rm -rf generated
mkdir -p generated/cnirpc

kube::codegen::gen_helpers --boilerplate hack/boilerplate.go.txt pkg/apis
kube::codegen::gen_register --boilerplate hack/boilerplate.go.txt pkg/apis
kube::codegen::gen_client \
  --with-watch \
  --output-dir generated --output-pkg "$MODULE/generated" \
  --boilerplate hack/boilerplate.go.txt \
  pkg/apis

PATH=$GOBIN:$PATH protoc -I pkg/apis/cnirpc \
  --go_out=. --go_opt=module="$MODULE" \
  --go-grpc_out=. --go-grpc_opt=module="$MODULE" \
  pkg/apis/cnirpc/cni.proto
# The result is the same with every protoc of the last years, but for its version.
sed -i -E '/^\/\/.*\bprotoc +v/d' generated/cnirpc/*.go

# A rule that names .metadata.name needs the field in the schema, where
# controller-gen has no marker to put it.
"$GOBIN/controller-gen" crd paths=./pkg/apis/coil/v2 output:crd:dir=manifests/crd
for crd in manifests/crd/coil.cybozu.com_*.yaml; do
  sed -i -z 's/\n          metadata:\n            type: object\n/\n          metadata:\n            properties:\n              name:\n                maxLength: 253\n                type: string\n            type: object\n/' "$crd"
  grep -q '^              name:$' "$crd" || {
    echo "$crd: no place for metadata.name found" >&2
    exit 1
  }
done
