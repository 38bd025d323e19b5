#!/usr/bin/env bash
# Installs Debian's Bazel 7 into its own directory, without changes to the machine's packages.
#
#   tools/install_bazel.sh PREFIX
#
# For machines that reach Debian's archive but not GitHub; tools/bazel calls it where it finds no other
# Bazel. `apt-get install -t forky bazel-bootstrap` would do too, but it replaces the C library, and
# nvcc before CUDA 13.2 rejects the headers of glibc 2.42 and later.
#
# The prefix contains absolute paths, so it is filled in place, under a lock, and PREFIX/bin/bazel comes
# last: if that file exists, the prefix is complete.
set -euo pipefail

prefix=${1:?usage: tools/install_bazel.sh PREFIX}
suite=${BAZEL_DEBIAN_SUITE:-forky}

fail() {
  printf 'install_bazel.sh: %s\nhint: %s\n' "$1" "$2" >&2
  exit 1
}

# shellcheck source=tools/private_apt.sh
source "$(dirname "${BASH_SOURCE[0]}")/private_apt.sh"

[[ $(uname -s) == Linux ]] || fail "this machine is not Linux" "install bazelisk; tools/bazel will use it"
for tool in apt-get dpkg-deb awk find flock python3 sed xargs; do
  command -v "$tool" >/dev/null ||
    fail "no $tool on PATH" "this way needs Debian's apt, util-linux and python3; or install bazelisk, which tools/bazel prefers"
done
[[ -r $keyring ]] || fail "no $keyring" "apt-get install debian-archive-keyring; or install bazelisk"

mkdir -p "${prefix%/*}"
exec 9>"$prefix.lock"
flock 9
[[ ! -x $prefix/bin/bazel ]] || exit 0

mirror=${BAZEL_DEBIAN_MIRROR:-$(debian_mirror)}
[[ -n $mirror ]] || fail "apt knows no Debian archive" "set BAZEL_DEBIAN_MIRROR to one; or install bazelisk"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
use_private_apt "$scratch" "$mirror" "$suite" ||
  fail "apt cannot read $suite from $mirror" "set BAZEL_DEBIAN_MIRROR or BAZEL_DEBIAN_SUITE"

# Everything that Bazel needs, less what only a build of Debian's own needs: compilers, the JDK, Perl, Python.
unneeded='^(openjdk-[0-9]+-jdk|default-|build-essential|g\+\+|gcc|cpp|binutils|dpkg|make|perl|python3|lib(perl|python|[a-z]*san[0-9]))|-dev$'
apt-get install -s -qq bazel-bootstrap bazel-rules-pkg libblake3-0 patchelf |
  awk '$1 == "Inst" {print $2}' | grep -vE "$unneeded" >"$scratch/packages"
(cd "$scratch/debs" && xargs apt-get download -qq <"$scratch/packages") >&2

root=$prefix/root
rm -rf "$prefix"
mkdir -p "$root" "$prefix/bin"
for deb in "$scratch"/debs/*.deb; do dpkg-deb -x "$deb" "$root"; done

# Links to absolute paths (/etc/java-25-openjdk and so on) stay inside the prefix.
find "$root" -type l -lname '/*' -print0 | while IFS= read -r -d '' link; do
  ln -sfn "$root$(readlink "$link")" "$link"
done

# The programs load the C library beside them, not the machine's.
lib=$root/usr/lib/$(uname -m)-linux-gnu
loader=$(echo "$lib"/ld-linux-*.so.*)
jre=$(readlink -f "$root"/usr/lib/jvm/java-1.*)
set_loader() {
  "$loader" --library-path "$lib" "$root/usr/bin/patchelf" --set-interpreter "$loader" --force-rpath --set-rpath "$2" "$1"
}
set_loader "$root/usr/bin/bazel" "$lib"
for tool in "$root"/usr/libexec/*/bazel/*; do set_loader "$tool" "$lib"; done
for tool in bin/java lib/jspawnhelper; do set_loader "$jre/$tool" "$jre/lib:$lib"; done

# The class path is a list of absolute paths, and gRPC's jars name three more in their manifests.
class_path=$root/usr/share/bazel/bazel_classpath_debian_depends.txt
sed -i "s#/usr/share/java#$root/usr/share/java#g" "$class_path"
for jar in perfmark-api animal-sniffer-annotations protobuf; do
  echo "$root/usr/share/java/$jar.jar" >>"$class_path"
done

# Java reads no PEM file: the machine's certificate authorities as a trust store. Without any, Bazel
# still builds what it fetches through pip and apt, and says which download it cannot verify.
mkdir -p "$root/etc/ssl/certs/java"
python3 - "${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" "$root/etc/ssl/certs/java/cacerts" <<'PY'
import hashlib
import pathlib
import re
import ssl
import struct
import sys


def text(value):
    return struct.pack(">H", len(value)) + value.encode()


source = pathlib.Path(sys.argv[1])
pem = source.read_text() if source.exists() else ""
certificates = re.findall(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", pem, re.S)
store = struct.pack(">IIi", 0xFEEDFEED, 2, len(certificates))
for number, der in enumerate(map(ssl.PEM_cert_to_DER_cert, certificates)):
    store += struct.pack(">I", 2) + text(f"ca{number}") + struct.pack(">q", 0) + text("X.509")
    store += struct.pack(">I", len(der)) + der
digest = hashlib.sha1("changeit".encode("utf-16-be") + b"Mighty Aphrodite" + store).digest()
pathlib.Path(sys.argv[2]).write_bytes(store + digest)
PY

cat >"$prefix/bazelrc" <<RC
startup --install_base=$root/usr/share/bazel
startup --trust_install_base
startup --server_javabase=$jre
RC
cat >"$prefix/bin/bazel.new" <<LAUNCHER
#!/bin/sh
exec $root/usr/bin/bazel --nosystem_rc --bazelrc=$prefix/bazelrc "\$@"
LAUNCHER
chmod +x "$prefix/bin/bazel.new"
# The lock must not outlive this script in a Bazel server.
"$prefix/bin/bazel.new" --version >&2 9>&-
mv "$prefix/bin/bazel.new" "$prefix/bin/bazel"
