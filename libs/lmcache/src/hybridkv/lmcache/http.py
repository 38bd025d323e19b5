"""What a server says of itself over HTTP, read within a deadline and a bound. For a thread that may wait."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

MAX_BODY_BYTES = 1 << 20
"""Of one answer. `/status` of a busy server has some kilobytes."""
_PIECE_BYTES = 16 << 10


class HttpError(Exception):
    """No answer that could be read, and why. It does not leave this library."""


@dataclass(frozen=True, slots=True)
class HttpAddress:
    """Where a server's HTTP side listens."""

    host: str
    port: int


def get_json(address: HttpAddress, path: str, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> Any:
    """What a GET answers, decoded. Waits for `timeout_s` at most, however slowly the answer comes.

    Raises:
        HttpError: nobody answers in time, or not with JSON, or at a length that no such answer has.
    """
    status, body = _ask(address, "GET", path, b"", timeout_s, clock)
    if status != http.client.OK:
        raise HttpError(f"GET {path}: status {status}")
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise HttpError(f"GET {path}: {error}") from None


def delete(
    address: HttpAddress, path: str, body: object, timeout_s: float, clock: Callable[[], float] = time.monotonic
) -> tuple[int, bytes]:
    """The status, and the body, that a DELETE with a body of JSON is answered with.

    Raises:
        HttpError: nobody answers in time, or at a length that no such answer has.
    """
    return _ask(address, "DELETE", path, msgspec.json.encode(body), timeout_s, clock)


def _ask(
    address: HttpAddress, method: str, path: str, body: bytes, timeout_s: float, clock: Callable[[], float]
) -> tuple[int, bytes]:
    until_s = clock() + timeout_s
    connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)
    try:
        connection.connect()
        with _ended_in(connection.sock, timeout_s):
            headers = {"Accept": "application/json", "Content-Type": "application/json", "Connection": "close"}
            connection.request(method, path, body=body or None, headers=headers)
            response = connection.getresponse()
            return response.status, _read(f"{method} {path}", response, until_s, clock)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise HttpError(f"{method} {path}: {type(error).__name__}: {error}") from None
    finally:
        connection.close()


@contextlib.contextmanager
def _ended_in(sock: socket.socket, timeout_s: float) -> Iterator[None]:
    """Ends what is read after so long. The timeout of a socket begins anew with each byte."""

    def end() -> None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _read(what: str, response: http.client.HTTPResponse, until_s: float, clock: Callable[[], float]) -> bytes:
    body = bytearray()
    while True:
        piece = response.read1(_PIECE_BYTES)
        if clock() >= until_s:  # it may have been ended
            raise HttpError(f"{what}: no whole answer in time")
        if not piece:
            return bytes(body)
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise HttpError(f"{what}: more than {MAX_BODY_BYTES} bytes")
