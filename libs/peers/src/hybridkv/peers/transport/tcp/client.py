"""Reads other processes' memory: one thread for all peers, which waits for none of them.

A read is over for its owner only when no connection can write for it any more. One that ends early takes the
connections with it on which its bytes are still to come; what else was asked for on them is asked for again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from hybridkv.peers.commands import Commands
from hybridkv.peers.transport.contract import Done, Failed, FailureReason, RemoteId
from hybridkv.peers.transport.memory import RegisteredMemory
from hybridkv.peers.transport.tcp.channel import Channel
from hybridkv.peers.transport.tcp.options import TcpOptions
from hybridkv.peers.transport.tcp.parts import Part, Transfer
from hybridkv.peers.transport.tcp.protocol import failure_of
from hybridkv.peers.wire import Channel as ChannelKind
from hybridkv.peers.wire import ClientHandshake, CloseReason, Identity, Session, WireError

logger = logging.getLogger(__name__)

Address: TypeAlias = tuple[int, "tuple[object, ...]"]

SWEEP_S = 0.1


class _Remote:
    def __init__(self, identity: Identity, peer_name: str, address: Address) -> None:
        self.identity = identity
        self.peer_name = peer_name
        self.address = address
        self.channels: list[Channel] = []
        self.queue: deque[Part] = deque()


class TcpClient:
    """Every method but `__init__` and `close` only puts something into the thread's queue."""

    def __init__(self, options: TcpOptions, memory: Callable[[], RegisteredMemory], clock: Callable[[], float]) -> None:
        self._options = options
        self._memory = memory
        self._clock = clock
        self._remotes: dict[RemoteId, _Remote] = {}
        self._owners: dict[Channel, _Remote] = {}
        self._running: dict[int, Transfer] = {}
        self._is_closing = False
        self.changed = threading.Event()
        """Set whenever a transfer is over."""
        self._selector = selectors.DefaultSelector()
        self._commands = Commands()
        self._selector.register(self._commands.woken, selectors.EVENT_READ)
        self._next_sweep_s = 0.0
        self._thread = threading.Thread(target=self._run, name="hybridkv-peer-client", daemon=True)
        self._thread.start()

    def attach(self, remote: RemoteId, identity: Identity, peer_name: str, address: Address) -> None:
        self._commands.post(lambda: self._remotes.__setitem__(remote, _Remote(identity, peer_name, address)))

    def detach(self, remote: RemoteId) -> None:
        self._commands.post(lambda: self._detach(remote))

    def begin(self, transfer: Transfer, parts: list[Part]) -> None:
        self._commands.post(lambda: self._begin(transfer, parts))

    def cancel(self, transfer: Transfer) -> None:
        self._commands.post(lambda: self._fail(transfer, FailureReason.CANCELLED, ""))

    def close(self, timeout_s: float) -> bool:
        self._is_closing = True
        self._commands.post(lambda: None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # On the thread.

    def _run(self) -> None:
        while not self._is_closing:
            for part in (self._look, self._commands.obey, self._sweep):
                self._safely(part)
        self._commands.obey()
        for remote in list(self._remotes):
            self._detach(remote)
        for transfer in list(self._running.values()):
            self._end(transfer, Failed(FailureReason.CLOSED))
        self._commands.close()
        self._selector.close()

    def _safely(self, part: Callable[[], None]) -> None:
        try:
            part()
        except Exception:  # without this thread no read would ever end, nor its blocks be free
            logger.exception("data connections met a bug")

    def _look(self) -> None:
        for key, _ in self._selector.select(SWEEP_S if self._running or self._owners else None):
            if key.fileobj is self._commands.woken:
                self._commands.drain()
            elif key.data in self._owners:
                self._serve(key.data)

    def _begin(self, transfer: Transfer, parts: list[Part]) -> None:
        if transfer.state.__class__ in (Done, Failed):
            return
        self._running[id(transfer)] = transfer
        remote = self._remotes.get(RemoteId(transfer.remote))
        if remote is None:
            self._end(transfer, Failed(FailureReason.CLOSED, "the peer was detached"))
            return
        remote.queue.extend(parts)
        self._share_out(remote)

    def _detach(self, number: RemoteId) -> None:
        remote = self._remotes.pop(number, None)
        if remote is None:
            return
        for channel in list(remote.channels):
            self._drop(channel, remote)
        remote.queue.clear()
        for transfer in [each for each in self._running.values() if each.remote == number]:
            self._end(transfer, Failed(FailureReason.CLOSED, "the peer was detached"))

    def _share_out(self, remote: _Remote) -> None:
        """Give what waits to connections that have room, and open one more where none has."""
        for channel in list(remote.channels):
            while remote.queue and channel.has_room:
                part = remote.queue.popleft()
                try:
                    channel.ask(part)
                    channel.flush()
                except WireError as error:
                    remote.queue.appendleft(part)
                    self._broke(channel, remote, error)
                    return
                self._watch(channel)
        idle = sum(channel.session.established is None for channel in remote.channels)
        while len(remote.queue) > idle and len(remote.channels) < self._options.connections:
            if not self._dial(remote):
                return
            idle += 1

    def _dial(self, remote: _Remote) -> bool:
        nonce = secrets.token_bytes(32)
        session = Session(
            ClientHandshake(remote.identity, ChannelKind.DATA, nonce, remote.peer_name), self._options.limits
        )
        family, address = remote.address
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            self._fail_queue(remote, FailureReason.BROKEN, str(error))
            return False
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        number = sock.connect_ex(address)
        if number not in (0, errno.EINPROGRESS):
            sock.close()
            self._fail_queue(remote, FailureReason.GONE, f"connect: errno {number}")
            return False
        channel = Channel(sock, session, self._clock())
        remote.channels.append(channel)
        self._owners[channel] = remote
        self._selector.register(sock, channel.events, channel)
        return True

    def _serve(self, channel: Channel) -> None:
        remote = self._owners[channel]
        try:
            if channel.is_connecting:
                channel.connected()
            else:
                for part, refusal in channel.receive(self._memory()):
                    self._part_is_over(part, refusal)
            channel.flush()
        except WireError as error:
            self._broke(channel, remote, error)
            return
        except Exception as error:  # a bug costs this connection, and no other read
            logger.exception("a data connection met a bug")
            self._broke(channel, remote, WireError(CloseReason.HANDLER, type(error).__name__))
            return
        if channel in self._owners:
            self._watch(channel)
            self._share_out(remote)

    def _part_is_over(self, part: Part, refusal: str) -> None:
        transfer = part.transfer
        if id(transfer) not in self._running:
            return
        if refusal:
            self._fail(transfer, FailureReason.REFUSED, refusal)
            return
        transfer.parts_left -= 1
        if not transfer.parts_left:
            seconds = self._clock() - transfer.began_s
            self._end(transfer, Done(transfer.num_bytes, transfer.num_descriptors, seconds))

    def _watch(self, channel: Channel) -> None:
        self._selector.modify(channel.sock, channel.events, channel)

    def _broke(self, channel: Channel, remote: _Remote, error: WireError) -> None:
        """A connection ended by itself: so do the reads that it was used for, and all that wait, if it was the last."""
        was_open = channel.session.established is not None
        asked = [part for _, part in channel.asked]
        self._drop(channel, remote)
        reason = failure_of(error.reason)
        for part in asked:
            self._fail(part.transfer, reason, str(error))
        if not was_open and not any(each.session.established for each in remote.channels):
            self._fail_queue(remote, reason, str(error))
        elif remote.queue:
            self._share_out(remote)

    def _fail_queue(self, remote: _Remote, reason: FailureReason, detail: str) -> None:
        for part in list(remote.queue):
            self._fail(part.transfer, reason, detail)

    def _fail(self, transfer: Transfer, reason: FailureReason, detail: str) -> None:
        """End a read early. It is over when this returns: what would still write for it is closed."""
        if self._running.get(id(transfer)) is not transfer:
            if transfer.state.__class__ not in (Done, Failed):
                self._end(transfer, Failed(reason, detail))
            return
        remote = self._remotes.get(RemoteId(transfer.remote))
        if remote is not None:
            others: list[Part] = []
            for channel in list(remote.channels):
                parts = [part for _, part in channel.asked]
                if any(part.transfer is transfer for part in parts):
                    self._drop(channel, remote)
                    others += [part for part in parts if part.transfer is not transfer]
            kept = [part for part in remote.queue if part.transfer is not transfer]
            remote.queue = deque(others + kept)
        self._end(transfer, Failed(reason, detail))
        if remote is not None and remote.queue:
            self._commands.post(lambda: self._share_out(remote))

    def _drop(self, channel: Channel, remote: _Remote) -> None:
        self._owners.pop(channel, None)
        if channel in remote.channels:
            remote.channels.remove(channel)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(channel.sock)
        channel.close()

    def _end(self, transfer: Transfer, state: Done | Failed) -> None:
        self._running.pop(id(transfer), None)
        transfer.state = state
        self.changed.set()

    def _sweep(self) -> None:
        now_s = self._clock()
        if now_s < self._next_sweep_s:
            return
        self._next_sweep_s = now_s + SWEEP_S
        for channel, remote in list(self._owners.items()):
            late_s = now_s - channel.began_s - self._options.connect_timeout_s
            if channel.session.established is None and late_s > 0 and channel in self._owners:
                self._broke(channel, remote, WireError(CloseReason.TOO_SLOW, "no handshake in time"))
        for transfer in list(self._running.values()):
            if now_s >= transfer.deadline_s:
                self._fail(transfer, FailureReason.TIMEOUT, "")
