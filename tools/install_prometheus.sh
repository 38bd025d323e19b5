#!/usr/bin/env bash
# Installs Debian's prometheus and promtool into their own directory, without changes to the machine's packages.
#
#   tools/install_prometheus.sh PREFIX
#
# PREFIX/bin/prometheus and PREFIX/bin/promtool need the C library and nothing else of the package's dependencies, which
# are for the pages that it shows to people. The suite is this machine's, so that its C library fits.
set -euo pipefail

prefix=${1:?usage: tools/install_prometheus.sh PREFIX}

fail() {
  printf 'install_prometheus.sh: %s\nhint: %s\n' "$1" "$2" >&2
  exit 1
}

# shellcheck source=tools/private_apt.sh
source "$(dirname "${BASH_SOURCE[0]}")/private_apt.sh"

for tool in apt-get dpkg-deb; do
  command -v "$tool" >/dev/null || fail "no $tool on PATH" "put prometheus and promtool on PATH"
done
[[ -r $keyring ]] || fail "no $keyring" "apt-get install debian-archive-keyring; or put prometheus and promtool on PATH"
suite=${PROMETHEUS_DEBIAN_SUITE:-$(. /etc/os-release && echo "${VERSION_CODENAME:-}")}
mirror=${PROMETHEUS_DEBIAN_MIRROR:-$(debian_mirror)}
[[ -n $suite && -n $mirror ]] || fail "apt knows no Debian archive" "put prometheus and promtool on PATH"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
use_private_apt "$scratch" "$mirror" "$suite" ||
  fail "apt cannot read $suite from $mirror" "set PROMETHEUS_DEBIAN_MIRROR or PROMETHEUS_DEBIAN_SUITE"
(cd "$scratch/debs" && apt-get download -qq prometheus) >&2
dpkg-deb -x "$scratch"/debs/prometheus_*.deb "$scratch/root"
mkdir -p "$prefix/bin"
for program in prometheus promtool; do
  "$scratch/root/usr/bin/$program" --version >/dev/null
  mv -f "$scratch/root/usr/bin/$program" "$prefix/bin/$program"
done
