"""`Transport` over TCP: a server for this process's memory and a client of others', each a thread."""

from __future__ import annotations

import ipaddress
import itertools
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from hybridkv.peers.errors import PeersConfigurationError, PeersProtocolError
from hybridkv.peers.ranges import Ranges
from hybridkv.peers.transport.contract import (
    Done,
    Failed,
    FailureReason,
    MayReach,
    Region,
    RemoteId,
    TransferId,
    TransferState,
)
from hybridkv.peers.transport.memory import RegisteredMemory
from hybridkv.peers.transport.tcp.client import Address, TcpClient
from hybridkv.peers.transport.tcp.options import TcpOptions
from hybridkv.peers.transport.tcp.parts import Transfer, parts_of
from hybridkv.peers.transport.tcp.protocol import (
    FORMAT_VERSION,
    TOKEN_BYTES,
    Capability,
    data_key,
    decode_capability,
    encode,
)
from hybridkv.peers.transport.tcp.server import TcpServer
from hybridkv.peers.wire import CloseReason, Identity, Secret, demand_secret, is_loopback, pack_columns


class TcpTransport:
    """`name` is this process's in handshakes, a fresh one for each. `secret` may be `NO_SECRET`: on loopback alone."""

    name = "tcp"

    def __init__(
        self,
        peer_name: str,
        secret: Secret,
        options: TcpOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options or TcpOptions()
        demand_secret("host", self._options.host, secret)
        self._peer_name = peer_name
        self._secret = secret
        self._clock = clock
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._host = self._options.advertised_host or self._options.host
        address = _address_of(self._host, 1)
        if address is None:
            raise PeersConfigurationError("advertised_host", "an address, not a name", self._host)
        if ipaddress.ip_address(str(address[1][0]).partition("%")[0]).is_unspecified:
            hint = "listening on every address does not say at which one this host is found"
            raise PeersConfigurationError("advertised_host", "an address that peers can connect to", self._host, hint)
        self._memory = RegisteredMemory()
        self._lock = threading.Lock()
        self._remote_numbers = itertools.count(1)
        self._transfer_numbers = itertools.count(1)
        self._known_remotes: set[RemoteId] = set()
        self._num_transfers = 0
        self._transfers: dict[TransferId, Transfer] = {}
        self._is_closed = False
        identity = Identity(peer_name, data_key(secret, self._token))
        self._server = TcpServer(identity, self._options, self._registered, clock)
        self._client = TcpClient(self._options, self._registered, clock)

    def register(self, regions: Sequence[Region]) -> bytes:
        self._demand_open("register")
        with self._lock:
            self._memory = self._memory.with_regions(regions)
            return self._capability()

    def deregister(self, regions: Sequence[int]) -> None:
        self._demand_open("deregister")
        with self._lock:
            self._memory = self._memory.without(regions)
        self._server.forget(regions)

    def attach(self, capability: bytes, may_reach: MayReach | None = None) -> RemoteId | Failed:
        self._demand_open("attach")
        decoded = decode_capability(capability)
        if isinstance(decoded, str):
            return Failed(FailureReason.REFUSED, decoded)
        if decoded.name == self._peer_name:
            return Failed(FailureReason.REFUSED, "this side's own capability")
        if not self._secret and not is_loopback(decoded.host):
            why = f"{decoded.host[:80]!r} is another host's, and this side has no secret"
            return Failed(FailureReason.REFUSED, why)
        address = _address_of(decoded.host, decoded.port)
        if address is None:
            return Failed(FailureReason.REFUSED, f"{decoded.host[:80]!r} is no address")
        if may_reach is not None and not may_reach(str(address[1][0])):
            return Failed(FailureReason.REFUSED, f"{decoded.host[:80]!r} is no address that may be connected to")
        remote = RemoteId(next(self._remote_numbers))
        identity = Identity(self._peer_name, data_key(self._secret, decoded.token))
        self._known_remotes.add(remote)
        self._client.attach(remote, identity, decoded.name, address)
        return remote

    def detach(self, remote: RemoteId) -> None:
        self._known_remotes.discard(remote)
        self._client.detach(remote)

    def read(self, remote: RemoteId, ranges: Ranges, timeout_s: float) -> TransferId:
        self._demand_open("read")
        number = TransferId(next(self._transfer_numbers))
        now_s = self._clock()
        transfer = Transfer(number, remote, now_s, now_s + timeout_s)
        is_full = len(self._transfers) >= self._options.max_transfers
        self._transfers[number] = transfer
        why_not = self._memory.why_not("local", ranges.local_regions, ranges.local_offsets, ranges.num_bytes)
        if is_full:
            transfer.state = Failed(FailureReason.BUSY, f"{self._options.max_transfers} reads are not released")
        elif remote not in self._known_remotes:
            transfer.state = Failed(FailureReason.CLOSED, "the peer is not attached")
        elif why_not is not None:
            transfer.state = Failed(FailureReason.REFUSED, why_not)
        elif not len(ranges):
            transfer.state = Done(0, 0, 0.0)
        else:
            parts = parts_of(transfer, ranges, self._options.share_bytes, self._options.max_ranges)
            self._client.begin(transfer, parts)
        return number

    def poll(self, transfer: TransferId) -> TransferState:
        return self._transfer(transfer).state

    def cancel(self, transfer: TransferId) -> None:
        if not _is_over(self._transfer(transfer)):
            self._client.cancel(self._transfers[transfer])

    def release(self, transfer: TransferId) -> bool:
        known = self._transfers.get(transfer)
        if known is None:
            return True
        if _is_over(known):
            del self._transfers[transfer]
            return True
        self._client.cancel(known)
        return False

    def wait(self, timeout_s: float) -> None:
        self._client.changed.wait(timeout_s)
        self._client.changed.clear()

    def progress(self) -> None:
        """Its threads need none."""

    def close(self, timeout_s: float) -> bool:
        self._is_closed = True
        until_s = self._clock() + timeout_s
        is_served = self._server.close(timeout_s)
        return self._client.close(max(0.0, until_s - self._clock())) and is_served

    def closed_connections(self) -> dict[CloseReason, int]:
        """Of peers that read here, by reason: what strangers tried is among it."""
        return self._server.closed()

    def _registered(self) -> RegisteredMemory:
        return self._memory

    def _capability(self) -> bytes:
        column = pack_columns((np.asarray(self._memory.num_bytes),))
        return encode(Capability(FORMAT_VERSION, self._peer_name, self._host, self._server.port, self._token, column))

    def _transfer(self, number: TransferId) -> Transfer:
        known = self._transfers.get(number)
        if known is None:
            raise PeersProtocolError(f"there is no transfer {number}, or it was released")
        return known

    def _demand_open(self, call: str) -> None:
        if self._is_closed:
            raise PeersProtocolError(f"{call}: called after close")


def _is_over(transfer: Transfer) -> bool:
    return isinstance(transfer.state, Done | Failed)


def _address_of(host: str, port: int) -> Address | None:
    """Without asking anybody: the caller's thread may not wait for a name."""
    try:
        found = socket.getaddrinfo(
            "127.0.0.1" if host == "localhost" else host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
    except (OSError, ValueError):
        return None
    return int(found[0][0]), found[0][4]
