"""The relay forwards allowed bytes in order, and detects when it holds some."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import patience
import pytest
from relay import ADDRESS, WAIT_S, Relay


class Server:
    """Answers each frame (four bytes of length, then the body) with the same frame, or with `answer`."""

    def __init__(self, answer: bytes = b"") -> None:
        self._answer = answer
        self.received_frames: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=self._listener.accept()[:1], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while head := connection.recv(4, socket.MSG_WAITALL):
                body = connection.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL)
                self.received_frames.append(body)
                connection.sendall(self._answer or head + body)


@contextlib.contextmanager
def relayed(server: Server) -> Iterator[tuple[Relay, socket.socket]]:
    relay = Relay(server.port)
    try:
        with socket.create_connection((ADDRESS, server.port), timeout=WAIT_S) as client:
            yield relay, client
    finally:
        relay.close()
        server.close()


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def received(client: socket.socket, size: int) -> bytes:
    # With a timeout set, recv returns the bytes that are available, even with MSG_WAITALL.
    data = b""
    while len(data) < size and (more := client.recv(size - len(data))):
        data += more
    return data


def test_all_bytes_pass_both_ways() -> None:
    with relayed(Server()) as (_, client):
        for body in (b"one", b"two" * 10_000):
            client.sendall(frame(body))
            assert received(client, 4 + len(body)) == frame(body)


@pytest.mark.parametrize("way", ["requests", "answers"])
def test_bytes_after_a_limit_are_held_and_later_forwarded_in_order(way: str) -> None:
    server = Server()
    with relayed(server) as (relay, client):
        gate = getattr(relay, way)
        gate.hold(after=7)
        client.sendall(frame(b"one") + frame(b"two") + frame(b"three"))
        gate.wait_until_holding()
        assert received(client, 7) == frame(b"one")
        client.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.recv(1)
        client.setblocking(True)
        if way == "requests":
            assert server.received_frames == [b"one"]
        else:
            patience.wait_until(lambda: server.received_frames == [b"one", b"two", b"three"], "all requests pass")
        gate.release()
        assert received(client, 16) == frame(b"two") + frame(b"three")


def test_held_bytes_stay_with_their_sender() -> None:
    answer = bytes(range(256)) * 64
    with relayed(Server(answer)) as (relay, client):
        gate = relay.answers
        gate.hold(after=100)
        client.sendall(frame(b"?"))
        gate.wait_until_holding()
        assert received(client, 100) == answer[:100]
        gate.release()
        assert received(client, len(answer) - 100) == answer[100:]


def test_only_the_next_piece_is_corrupted() -> None:
    with relayed(Server()) as (relay, client):
        relay.answers.release(is_spoilt=True)
        client.sendall(frame(b"one"))
        assert received(client, 7) == bytes(byte ^ 0xFF for byte in frame(b"one"))
        client.sendall(frame(b"two"))
        assert received(client, 7) == frame(b"two")


def test_a_cut_ends_connections_and_allows_new_ones() -> None:
    with relayed(server := Server()) as (relay, client):
        client.sendall(frame(b"one"))
        assert received(client, 7) == frame(b"one")
        relay.cut()
        assert client.recv(1) == b""
        with socket.create_connection((ADDRESS, server.port), timeout=WAIT_S) as other:
            other.sendall(frame(b"two"))
            assert received(other, 7) == frame(b"two")


def test_close_ends_a_held_connection() -> None:
    with relayed(Server()) as (relay, client):
        relay.answers.hold()
        client.sendall(frame(b"one"))
        relay.answers.wait_until_holding()
        relay.close()
        assert client.recv(1) == b""
