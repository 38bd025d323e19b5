#!/usr/bin/env bash
# Resolves the .in files anew: engine first, so that all locks agree on every version.
#
#   third_party/python/lock.sh [--upgrade]
#
# Needs uv on PATH, or $UV. $PIP_FIND_LINKS may name where a CPU build of torch lies.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

uv=${UV:-uv}
command -v "$uv" >/dev/null || {
  echo "lock.sh: no uv on PATH; hint: pip install uv, or set UV to one" >&2
  exit 1
}

find_links=()
for place in ${PIP_FIND_LINKS:-}; do find_links+=("--find-links=$place"); done

# A lock says what is installed and by which hash, never where this machine found it.
compile() {
  "$uv" pip compile --quiet --no-config --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
    --generate-hashes --python-version=3.11 --python-platform=x86_64-manylinux_2_28 "${find_links[@]}" "$@"
}
compile "$@" --overrides=engine_excludes.txt --output-file=engine_lock.txt engine.in
compile "$@" --constraints=engine_lock.txt --output-file=requirements_lock.txt requirements.in
compile "$@" --no-deps --output-file=nixl_lock.txt nixl.in
compile "$@" --constraints=engine_lock.txt --output-file=site_lock.txt site.in
compile "$@" --output-file=seaweedfs_lock.txt seaweedfs.in
compile "$@" --overrides=lmcache_excludes.txt --output-file=lmcache_0_5_6_lock.txt lmcache_0_5_6.in
compile "$@" --overrides=lmcache_excludes.txt --output-file=lmcache_0_5_7rc2_lock.txt lmcache_0_5_7rc2.in
