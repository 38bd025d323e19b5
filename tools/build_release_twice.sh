#!/usr/bin/env bash
# Builds //:release a second time, in a directory of its own and without cached results, and compares all bytes.
#
#   tools/build_release_twice.sh
#
# Exits with 1 and names the files if two builds of these sources differ. It compiles everything, in a few minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scratch=$(mktemp -d)
cleanup() {
  tools/bazel --output_base="$scratch/base" shutdown || true
  chmod -R u+w "$scratch"
  rm -rf "$scratch"
}
trap cleanup EXIT

tools/bazel build "$@" //:release
tools/bazel --output_base="$scratch/base" build "$@" --disk_cache= --symlink_prefix="$scratch/second-" //:release
diff -r bazel-bin/plugins/release "$scratch/second-bin/plugins/release"
echo "two builds of //:release have the same bytes"
