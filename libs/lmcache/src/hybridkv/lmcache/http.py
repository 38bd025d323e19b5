"""HTTP requests to a server, with a deadline and a size limit. Blocking."""

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
"""Maximum size of an answer. `/status` of a busy server has some kilobytes."""
_PIECE_BYTES = 16 << 10


class HttpError(Exception):
    """No valid answer. Never raised to callers outside this library."""


@dataclass(frozen=True, slots=True)
class HttpAddress:
    """HTTP address of a server."""

    host: str
    port: int


def get_json(address: HttpAddress, path: str, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> Any:
    """Sends a GET and decodes the JSON answer. The connect takes at most `timeout_s` for each address of the host, and
    the answer at most `timeout_s`, also if bytes arrive slowly.

    Raises:
        HttpError: no answer in time, a status other than 200, not JSON, or too long.
    """
    status, body = _request(address, "GET", path, b"", timeout_s, clock)
    if status != http.client.OK:
        raise HttpError(f"GET {path}: status {status}")
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise HttpError(f"GET {path}: {error}") from None


def delete(address: HttpAddress, path: str, body: object, timeout_s: float) -> tuple[int, bytes]:
    """Sends a DELETE with a JSON body. Returns status and body.

    Raises:
        HttpError: no answer in time, or too long.
    """
    return _request(address, "DELETE", path, msgspec.json.encode(body), timeout_s, time.monotonic)


def _request(
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
    """Shuts the socket down after `timeout_s`: the socket's own timeout restarts with each byte."""

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
        if clock() >= until_s:  # the timer may have shut the socket down
            raise HttpError(f"{what}: no complete answer in time")
        if not piece:
            return bytes(body)
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise HttpError(f"{what}: more than {MAX_BODY_BYTES} bytes")
