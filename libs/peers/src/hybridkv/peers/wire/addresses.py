"""Where a process without a secret may listen and connect: this host alone."""

from __future__ import annotations

import ipaddress

from hybridkv.peers.errors import PeersConfigurationError
from hybridkv.peers.wire.secret import Secret

LOCAL_NAME = "localhost"


def is_loopback(host: str) -> bool:
    """Whether an address reaches no other host. A name does not count, whatever it stands for: only `localhost`."""
    if host == LOCAL_NAME:
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def demand_secret(field: str, host: str, secret: Secret) -> None:
    """`PeersConfigurationError` where `host` can be reached from elsewhere, or is elsewhere, and there is no secret."""
    if not secret and not is_loopback(host):
        hint = "give secret_file: without a secret anybody who reaches this address reads the cache"
        raise PeersConfigurationError(field, "a loopback address, since there is no secret", host, hint)
