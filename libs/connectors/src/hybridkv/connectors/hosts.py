"""Hosts to which a request may make this engine connect.

A request can name hosts: a producer of HybridNixlConnector, or peers in a hint. Without a list, a client could make an
engine connect to any reachable host. This module does not resolve names, because the address of a name may change at
any time: a name that is not on the list is refused.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from typing import TypeAlias

LOOPBACK = ("127.0.0.0/8", "::1/128", "localhost")
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")
_ZONE = re.compile(r"[A-Za-z0-9_.-]{1,32}")
_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
"""IPv4 addresses in the form of IPv6."""
_Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
_Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


class AllowedHosts:
    """Set of allowed names and networks; `in` tests a host.

    Args:
        entries: names, addresses, and networks such as "10.0.0.0/8".

    Raises:
        ValueError: an entry is no name, address or network; the text quotes the entry.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self.names: set[str] = set()
        self.networks: list[_Network] = []
        for entry in entries:
            try:
                self.networks.append(_network(entry))
            except ValueError as error:
                # "10.0.0.1/8" and "10.1" are no names: the first is a malformed network, the second a short address.
                if not _is_name(entry):
                    raise ValueError(f"{entry!r}: {error}") from None
                self.names.add(_folded(entry))

    def __contains__(self, host: str) -> bool:
        address = _address(host)
        if address is None:
            return _folded(host) in self.names
        return any(address.version == network.version and address in network for network in self.networks)


def normal_host(host: str) -> str | None:
    """Normal form of a host: an address in its shortest form, or a name in lower case. None if the host is neither."""
    address = _address(host)
    if address is not None:
        return str(address)
    return _folded(host) if _is_name(host) else None


def default_hosts(*own: str | None) -> tuple[str, ...]:
    """Entries for the loopback and for `own`, the addresses of this engine, without wildcard addresses."""
    given = (host for host in own if host and not is_wildcard(host))
    return tuple(dict.fromkeys((*LOOPBACK, *given)))


def _network(entry: str) -> _Network:
    """Network of an entry, as IPv4 if it is IPv4-mapped. Raises `ValueError` if the entry is no network."""
    network = ipaddress.ip_network(entry)
    if isinstance(network, ipaddress.IPv6Network) and "%" not in entry and network.subnet_of(_MAPPED):
        return ipaddress.IPv4Network((network.network_address.ipv4_mapped, network.prefixlen - _MAPPED.prefixlen))
    return network


def _address(host: str) -> _Address | None:
    """Address of a host, as IPv4 if it is IPv4-mapped. None for a name and for an address with a malformed zone."""
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


def is_wildcard(host: str) -> bool:
    """Whether a host is a wildcard address: a server can listen on it. "0" is a wildcard too, as for the system."""
    address = _address(host)
    if address is not None:
        return address.is_unspecified
    try:
        return not any(socket.inet_aton(host))
    except (OSError, ValueError):
        return False


def _folded(name: str) -> str:
    return name.lower().removesuffix(".")
