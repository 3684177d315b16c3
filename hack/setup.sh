#!/usr/bin/env bash
# Installs the Debian packages that a purpose needs and this machine lacks:
#   hack/setup.sh demo    the lab, and what "make demo" shows its results with
#   hack/setup.sh test    also the compilers that tests and generated code need
#   hack/setup.sh bench-egress    the lab, and what measures a way through a network
# It changes nothing when all are there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

command -v go >/dev/null || {
  echo "go is missing: install the version that go.mod names, or a later one" >&2
  exit 1
}

packages=(iproute2 nftables sqlite3 ca-certificates)
case ${1:-} in
demo) ;;
test) packages+=(chromium e2fsprogs etcd-server gcc git iptables iputils-ping libc6-dev libprotobuf-dev make openssl prometheus protobuf-compiler python3 systemd wget) ;;
bench-egress) packages+=(iperf3 iputils-ping) ;;
*)
  echo "usage: hack/setup.sh demo|test|bench-egress" >&2
  exit 2
  ;;
esac
lab=$(go run ./integration/lab packages)
read -ra lab <<<"$lab"
packages+=("${lab[@]}")

command -v dpkg-query >/dev/null || {
  # Not Debian: whether the programs are there is all that can be told.
  exec go run ./integration/lab preflight
}

missing=()
for p in "${packages[@]}"; do
  [[ $(dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null) == installed ]] || missing+=("$p")
done
((${#missing[@]})) || exit 0

echo "installing ${missing[*]}"
if ((EUID != 0)); then
  echo "only root can: apt-get install --no-install-recommends ${missing[*]}" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
install() { apt-get -qq -y install --no-install-recommends "${missing[@]}" </dev/null; }
# Missing or outdated package lists are why it fails where it does.
install || {
  apt-get -qq update
  install
}

# Debian starts these as soon as they are installed. The tests run them in networks of their own; this
# machine's routes and addresses are none of their business. Of Prometheus they run the program that checks its rules, too.
for daemon in bird2:bird etcd-server:etcd frr:frr keepalived:keepalived prometheus:prometheus; do
  if [[ -d /run/systemd/system && " ${missing[*]} " == *" ${daemon%:*} "* ]]; then
    systemctl --quiet disable --now "${daemon#*:}"
  fi
done
