#!/usr/bin/env bash
# Installs Debian's headless Chromium into its own directory, without changes to the machine's packages.
#
#   tools/install_chromium.sh PREFIX
#
# PREFIX/chromium.sh runs it, with the libraries and fonts that it depends on; only the C library is the machine's. The
# suite is this machine's, so that its C library fits.
set -euo pipefail

prefix=${1:?usage: tools/install_chromium.sh PREFIX}

fail() {
  printf 'install_chromium.sh: %s\nhint: %s\n' "$1" "$2" >&2
  exit 1
}

# shellcheck source=tools/private_apt.sh
source "$(dirname "${BASH_SOURCE[0]}")/private_apt.sh"

for tool in apt-get dpkg-deb; do
  command -v "$tool" >/dev/null || fail "no $tool on PATH" "put chromium on PATH"
done
[[ -r $keyring ]] || fail "no $keyring" "apt-get install debian-archive-keyring; or put chromium on PATH"
suite=${CHROMIUM_DEBIAN_SUITE:-$(. /etc/os-release && echo "${VERSION_CODENAME:-}")}
mirror=${CHROMIUM_DEBIAN_MIRROR:-$(debian_mirror)}
[[ -n $suite && -n $mirror ]] || fail "apt knows no Debian archive" "put chromium on PATH"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
use_private_apt "$scratch" "$mirror" "$suite" ||
  fail "apt cannot read $suite from $mirror" "set CHROMIUM_DEBIAN_MIRROR or CHROMIUM_DEBIAN_SUITE"
# This apt has no package installed, so it downloads all dependencies.
packages=(chromium-headless-shell fonts-dejavu-core)
apt-get install -qq --download-only --yes -o Debug::NoLocking=1 "${packages[@]}" >&2 ||
  fail "$suite has no chromium-headless-shell" "put chromium on PATH"
for deb in "$scratch"/archives/*.deb; do
  case ${deb##*/} in
    chromium* | font* | lib* | zlib1g_*) dpkg-deb -x "$deb" "$scratch/root" ;;
  esac
done

machine=$(uname -m)-linux-gnu
mkdir -p "$prefix/lib" "$prefix/share" "$scratch/lib"
cp -r "$scratch/root/usr/lib/chromium" "$prefix/"
find "$scratch/root/lib/$machine" "$scratch/root/usr/lib/$machine" -name '*.so*' -exec cp -Pt "$scratch/lib" {} + 2>/dev/null || true
find "$scratch/lib" -xtype l -delete
# Of these, what it is linked with, and what libnss3 opens.
LD_LIBRARY_PATH=$scratch/lib ldd "$prefix/chromium/chromium-headless-shell" |
  sed -n "s|.* => \\($scratch/lib/[^ ]*\\) .*|\\1|p" |
  grep -Ev '/(libc|libm|libdl|libpthread|librt|libresolv)\.so' |
  xargs cp -Lt "$prefix/lib" "$scratch"/lib/lib{softokn3,freebl3,freeblpriv3}.so
cp -r "$scratch/root/usr/share/fonts" "$prefix/share/"
cat >"$prefix/fonts.conf" <<CONF
<?xml version="1.0"?>
<fontconfig>
  <dir prefix="relative">share/fonts</dir>
  <cachedir prefix="xdg">fontconfig</cachedir>
  <alias><family>monospace</family><prefer><family>DejaVu Sans Mono</family></prefer></alias>
</fontconfig>
CONF
cat >"$prefix/chromium.sh" <<'RUN'
#!/bin/sh
root=$(dirname "$(readlink -f "$0")")
LD_LIBRARY_PATH=$root/lib FONTCONFIG_FILE=$root/fonts.conf exec "$root/chromium/chromium-headless-shell" "$@"
RUN
chmod +x "$prefix/chromium.sh"
"$prefix/chromium.sh" --version >/dev/null
