"""Address rule for a process without a secret: it may listen and connect on this host only."""

from __future__ import annotations

import ipaddress

from hybridkv.peers.errors import PeersConfigurationError
from hybridkv.peers.wire.secret import Secret

LOCAL_NAME = "localhost"


def is_loopback(host: str) -> bool:
    """True for a loopback address and for `localhost`. False for every other name, whatever it resolves to."""
    if host == LOCAL_NAME:
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def demand_secret(field: str, host: str, secret: Secret) -> None:
    """Raises `PeersConfigurationError` if there is no secret and `host` is not a loopback address."""
    if not secret and not is_loopback(host):
        hint = "set secret_file: without a secret, any process that reaches this address can read the cache"
        raise PeersConfigurationError(field, "a loopback address, because there is no secret", host, hint)
