"""Attacks of strangers on the port of control connections, each repeated until stopped, with honest requests beside it.

A stranger does not know the secret. `test_control.py` covers peers that know it and break every other rule.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import zmq
from control_pair import TIMEOUT_S, Recorder

from hybridkv.peers.control import ControlLoop, LinkId
from hybridkv.peers.control.curve import CurveKeys
from hybridkv.peers.leases import Lease
from hybridkv.peers.wire import PROTOCOL_VERSION, CloseReason, Hello, Message, MessageCodec, Renew, Renewed, Secret
from hybridkv.peers.wire import WireLimits as Limits

SECRET = Secret(b"a secret that both sides know")
WRONG = Secret(b"a secret that nobody knows")
Address = tuple[str, int]
CROWD = "127.0.0.2"
"""Source address of the crowd, so that it differs from that of honest peers."""
GREETING = (b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE").ljust(64, b"\0")
HELLO = MessageCodec(Limits()).encode(Hello(PROTOCOL_VERSION, "stranger"))


def _send(address: Address, data: bytes, is_closed: bool = True) -> socket.socket:
    sock = socket.create_connection(address, TIMEOUT_S)
    with contextlib.suppress(OSError):
        sock.sendall(data)
    if is_closed:
        sock.close()
    return sock


def _receive(sock: socket.socket, num_bytes: int) -> bytes:
    data = b""
    with contextlib.suppress(OSError):
        while len(data) < num_bytes and (more := sock.recv(num_bytes - len(data))):
            data += more
    return data


def garbage(address: Address, chance: random.Random) -> None:
    """Random bytes."""
    _send(address, chance.randbytes(chance.randrange(1, 4096)))


def another_protocol(address: Address, chance: random.Random) -> None:
    _send(address, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")


def half_greeting(address: Address, chance: random.Random) -> None:
    _send(address, GREETING[: chance.randrange(1, 64)])


def half_frame(address: Address, chance: random.Random) -> None:
    """A first command that breaks off, after a valid greeting."""
    _send(address, GREETING + b"\x04\xc8\x05HELLO\x01\x00" + chance.randbytes(chance.randrange(190)))


def oversized_frame(address: Address, chance: random.Random) -> None:
    """The header of a frame longer than any may be."""
    _send(address, GREETING + b"\x06" + struct.pack(">Q", 1 << 62) + bytes(64))


def forged_hello(address: Address, chance: random.Random) -> None:
    """A first command of the right form, with a key and a box that were not made by a peer."""
    _send(address, GREETING + b"\x04\xc8\x05HELLO\x01\x00" + bytes(72) + chance.randbytes(120))


def no_security(address: Address, chance: random.Random) -> None:
    """A ZeroMQ peer that wants to connect without a key."""
    _send(address, GREETING.replace(b"CURVE", b"NULL\0") + b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x06DEALER")


def old_peer(address: Address, chance: random.Random) -> None:
    """The first message of protocol version 1."""
    hello = b"\x96\xa5hello\xaehybridkv.peers\x01\xa7control\xa1x\xc4\x20" + chance.randbytes(32)
    _send(address, len(hello).to_bytes(4, "big") + hello)


def slow_clients(address: Address, chance: random.Random) -> None:
    """As many clients as there are places, each sending a byte at a time."""
    slow = [_send(address, GREETING[:1], is_closed=False) for _ in range(Limits().max_handshakes)]
    for at in range(1, 12):
        for each in slow:
            with contextlib.suppress(OSError):
                each.sendall(GREETING[at : at + 1])
    for each in slow:
        each.close()


def flood(address: Address, chance: random.Random) -> None:
    """Silent connections, many times more than there are places."""
    crowd = [socket.create_connection(address, TIMEOUT_S, (CROWD, 0)) for _ in range(4 * Limits().max_handshakes)]
    for each in crowd:
        each.close()


def replay(address: Address, chance: random.Random) -> None:
    """All bytes of an honest peer, sent again."""
    _send(address, _recorded(address))


def wrong_key(address: Address, chance: random.Random) -> None:
    """A ZeroMQ peer that knows another secret."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.reconnect_ivl = -1
        CurveKeys.of(WRONG).as_client(dealer)
        dealer.connect("tcp://{}:{}".format(*address))
        with contextlib.suppress(zmq.Again):
            dealer.send(HELLO, zmq.DONTWAIT)
        dealer.poll(20)


ATTACKS: tuple[Callable[[Address, random.Random], None], ...] = (
    *(garbage, another_protocol, half_greeting, half_frame, oversized_frame, forged_hello, no_security, old_peer),
    *(slow_clients, flood, replay, wrong_key),
)

_records: dict[Address, bytes] = {}


def _recorded(address: Address) -> bytes:
    """Bytes that an honest peer sends to be admitted, as recorded by a relay."""
    if address not in _records:
        with socket.create_server(("127.0.0.1", 0)) as server:
            loop, heard = ControlLoop("recorded", SECRET, Limits()), Recorder()
            loop.connect(*server.getsockname(), None, heard.handlers)
            client, far = server.accept()[0], socket.create_connection(address, TIMEOUT_S)
            taken = bytearray()

            def carry(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
                with contextlib.suppress(OSError):
                    while data := source.recv(65536):
                        kept += data
                        target.sendall(data)

            ways = ((client, far, taken), (far, client, bytearray()))
            for way in ways:
                threading.Thread(target=carry, args=way, daemon=True).start()
            heard.until_open()
            loop.close(TIMEOUT_S)
            client.close()
            far.close()
        _records[address] = bytes(taken)
    return _records[address]


class AttackedListener:
    """A listener that replies, and an honest peer that sends requests to it."""

    def __init__(self) -> None:
        self.listening = ControlLoop("producer", SECRET, Limits())
        self.connecting = ControlLoop("consumer", SECRET, Limits())
        self.there, self._here = Recorder(self._reply), Recorder()
        self.address = self.listening.listen("127.0.0.1", 0, self.there.handlers)
        self.link = self.connecting.connect(*self.address, "producer", self._here.handlers)
        self._here.until_open()
        self.there.until_open()

    def _reply(self, link: LinkId, message: Message) -> None:
        assert isinstance(message, Renew)
        self.listening.send(link, Renewed(message.lease, 1.0))

    def ask(self) -> float:
        """Seconds until the reply."""
        expected = len(self._here.received) + 1
        began_s = time.perf_counter()
        assert self.connecting.send(self.link, Renew(Lease(1, 1)))
        self._here.until(lambda: len(self._here.received) >= expected)
        return time.perf_counter() - began_s

    @contextlib.contextmanager
    def under(self, attack: Callable[[Address, random.Random], None]) -> Iterator[Callable[[], int]]:
        """Runs the attack meanwhile. Yields a function that returns the number of attempts."""
        is_over, tries = threading.Event(), [0]

        def go_on() -> None:
            chance = random.Random(0)
            while not is_over.is_set():
                with contextlib.suppress(OSError):
                    attack(self.address, chance)
                tries[0] += 1
                time.sleep(0.001)

        attacker = threading.Thread(target=go_on, daemon=True)
        attacker.start()
        try:
            yield lambda: tries[0]
        finally:
            is_over.set()
            attacker.join(TIMEOUT_S)

    def num_admitted(self) -> int:
        return self.listening.counts().opened

    def num_rejected(self) -> int:
        ended = self.listening.counts().closed
        return sum(ended.values()) - ended.get(CloseReason.DONE, 0)

    def close(self) -> None:
        for loop in (self.connecting, self.listening):
            assert loop.close(TIMEOUT_S)
