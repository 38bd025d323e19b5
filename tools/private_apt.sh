# Sourced: Debian's apt with its own lists, caches and status, so that the machine's packages do not change. Needs no
# root. The caller has `fail MESSAGE HINT`.

keyring=/usr/share/keyrings/debian-archive-keyring.gpg

# The archive that this machine's apt already uses; nothing if it uses no Debian archive.
debian_mirror() {
  apt-get indextargets --format '$(SITE)' | grep -m 1 '/debian/*$' || true
}

# use_private_apt SCRATCH MIRROR SUITE: from here on apt-get uses only that suite of that archive.
use_private_apt() {
  local scratch=$1 mirror=$2 suite=$3
  mkdir -p "$scratch"/{lists/partial,archives/partial,debs}
  : >"$scratch/status"
  echo "deb [signed-by=$keyring] $mirror $suite main" >"$scratch/sources.list"
  cat >"$scratch/apt.conf" <<CONF
Dir::Etc::sourcelist "$scratch/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
Dir::State::lists "$scratch/lists";
Dir::State::status "$scratch/status";
Dir::Cache "$scratch";
Acquire::Check-Valid-Until "false";
Acquire::Languages "none";
Acquire::Retries "3";
APT::Install-Recommends "false";
APT::Sandbox::User "root";
CONF
  export APT_CONFIG=$scratch/apt.conf
  apt-get update -qq >&2
}
