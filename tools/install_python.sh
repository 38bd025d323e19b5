#!/usr/bin/env bash
# Installs Debian's Python 3.13 with headers into its own directory, without changes to the machine's packages.
#
#   tools/install_python.sh PREFIX
#
# PREFIX/usr/include has the headers. PREFIX/python runs it with the C library that it was built for. PREFIX may move.
# Tests use it to run extensions for Python 3.12 and later on a Python other than this machine's.
set -euo pipefail

prefix=${1:?usage: tools/install_python.sh PREFIX}
suite=${PYTHON_DEBIAN_SUITE:-trixie}

fail() {
  printf 'install_python.sh: %s\nhint: %s\n' "$1" "$2" >&2
  exit 1
}

# shellcheck source=tools/private_apt.sh
source "$(dirname "${BASH_SOURCE[0]}")/private_apt.sh"

for tool in apt-get dpkg-deb; do
  command -v "$tool" >/dev/null || fail "no $tool on PATH" "wheels for Python 3.12 and later are built on a Debian"
done
[[ -r $keyring ]] || fail "no $keyring" "apt-get install debian-archive-keyring"
mirror=${PYTHON_DEBIAN_MIRROR:-$(debian_mirror)}
[[ -n $mirror ]] || fail "apt knows no Debian archive" "set PYTHON_DEBIAN_MIRROR to one"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
use_private_apt "$scratch" "$mirror" "$suite" ||
  fail "apt cannot read $suite from $mirror" "set PYTHON_DEBIAN_MIRROR or PYTHON_DEBIAN_SUITE"
packages=(libpython3.13-{dev,minimal,stdlib} python3.13-minimal libc6 libexpat1 zlib1g libgcc-s1)
(cd "$scratch/debs" && apt-get download -qq "${packages[@]}") >&2 ||
  fail "apt cannot download Python 3.13 of $suite from $mirror" "set PYTHON_DEBIAN_MIRROR or PYTHON_DEBIAN_SUITE"
for deb in "$scratch"/debs/*.deb; do dpkg-deb -x "$deb" "$scratch/root"; done

mkdir -p "$prefix/usr/bin" "$prefix/usr/lib"
machine=$(uname -m)-linux-gnu
cp -r "$scratch/root/usr/include" "$prefix/usr/"
cp -r "$scratch/root/usr/lib/python3.13" "$prefix/usr/lib/"
cp "$scratch/root/usr/bin/python3.13" "$prefix/usr/bin/"
mkdir -p "$prefix/usr/lib/$machine"
find "$scratch/root/usr/lib/$machine" -maxdepth 1 -name '*.so*' ! -name 'libpython*' -exec cp -P {} "$prefix/usr/lib/$machine/" \;
# Links out of the tree, to what this does not need.
find "$prefix/usr" -xtype l -delete
cat >"$prefix/python" <<RUN
#!/bin/sh
root=\$(dirname "\$(readlink -f "\$0")")/usr
lib=\$root/lib/$machine
PYTHONHOME=\$root exec "\$lib/$(basename "$(echo "$scratch/root/usr/lib/$machine"/ld-linux-*.so.*)")" --library-path "\$lib:/usr/lib/$machine" "\$root/bin/python3.13" "\$@"
RUN
chmod +x "$prefix/python"
"$prefix/python" -c 'import sys; assert sys.version_info[:2] == (3, 13)'
