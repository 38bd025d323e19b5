"""Which hosts a request may send this engine to.

`remote_host` comes with a request, from whoever may ask for a completion. Without a list a client could make an engine
open connections wherever it can reach. No name is looked up here: one that is not on the list is refused, whatever it
stands for, for a name may stand for another address a moment later.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from typing import TypeAlias

LOOPBACK = ("127.0.0.0/8", "::1/128", "localhost")
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*\.?")
_ZONE = re.compile(r"[A-Za-z0-9_.-]{1,32}")
_Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
_Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


class AllowedHosts:
    """Names and networks.

    Args:
        entries: each a name, an address, or a network such as "10.0.0.0/8".

    Raises:
        ValueError: an entry is neither; it says which.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._names: set[str] = set()
        self._networks: list[_Network] = []
        for entry in entries:
            try:
                self._networks.append(ipaddress.ip_network(entry))
            except ValueError as error:
                # What looks like numbers is no name: "10.0.0.1/8" is a mistake, and "10.1" another way to write one.
                if not _is_name(entry):
                    raise ValueError(f"{entry!r}: {error}") from None
                self._names.add(_folded(entry))

    def __contains__(self, host: str) -> bool:
        address = _address(host)
        if address is None:
            return _folded(host) in self._names
        return any(address.version == network.version and address in network for network in self._networks)


def default_hosts(*own: str | None) -> tuple[str, ...]:
    """The loopback, and the addresses at which this engine itself is asked."""
    given = (host for host in own if host and not is_any(host))
    return tuple(dict.fromkeys((*LOOPBACK, *given)))


def _address(host: str) -> _Address | None:
    """An address, or the one that it stands for; None for a name, and for an address with a zone that is no name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    zone = getattr(address, "scope_id", None)
    if zone is not None and not _ZONE.fullmatch(zone):
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _is_name(entry: str) -> bool:
    folded = _folded(entry)
    return len(folded) <= 253 and _NAME.fullmatch(folded) is not None and not folded.split(".")[-1].isdigit()


def is_any(host: str) -> bool:
    """Whether it is where one listens, and no place to go to; as the system reads it, to whom "0" is one too."""
    address = _address(host)
    if address is not None:
        return address.is_unspecified
    try:
        return not any(socket.inet_aton(host))
    except (OSError, ValueError):
        return False


def _folded(name: str) -> str:
    return name.lower().removesuffix(".")
