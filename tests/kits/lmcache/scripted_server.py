"""LMCache server with scripted answers: its ZeroMQ and HTTP sides, with answers that may be anything or nothing."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from hybridkv.lmcache.connection import ServerAddress

Frames = Sequence[bytes]
Script = Callable[[str, Frames], Sequence[Frames]]
"""Returns the frames to send. Receives the call's name and its frames: identity, uid, operation, payloads. An answer
begins with the identity."""

NAMES = {
    1: "register_kv_cache",
    2: "unregister_kv_cache",
    6: "store",
    7: "retrieve",
    8: "lookup",
    9: "query_prefetch_status",
    12: "free_lookup_locks",
    13: "end_session",
    21: "get_chunk_size",
    22: "ping",
    24: "noop",
    32: "get_experimental",
}
VALUES: dict[str, Any] = {
    "store": [b"handle", True],
    "retrieve": [b"handle", True],
    "query_prefetch_status": 0,
    "get_chunk_size": 256,
    "negotiate_chunk_size": 256,
    "ping": True,
    "noop": "OK",
    "get_experimental": [],
}
CONFIG: dict[str, Any] = {
    "instance_id": "scripted",
    "chunk_size": 256,
    "separate_object_groups": True,
    "null_block_id": 0,
    "transport": "zmq",
    "engine_type": "default",
}


def polite(name: str, frames: Frames) -> list[Frames]:
    """The answer of a real server that holds nothing."""
    value = VALUES.get(name)
    return [[*frames[:3], *([] if value is None else [msgspec.msgpack.encode(value)])]]


def silent(name: str, frames: Frames) -> list[Frames]:
    """No answer."""
    return []


class ScriptedServer:
    """Listens on loopback until it is closed.

    Args:
        script: returns the answers; may be replaced.
        version: the version that it reports.
        pages: bodies of GET by path; the others are as of a real server.
    """

    def __init__(
        self, script: Script = polite, version: str = "0.5.7rc2", pages: dict[str, bytes] | None = None
    ) -> None:
        self.script = script
        self.calls: list[str] = []
        """Names of the received calls."""
        said = {"/lmc_version": msgspec.json.encode(version), "/config": msgspec.json.encode({"mp": CONFIG})}
        self.pages = {**said, **(pages or {})}
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._is_over = threading.Event()
        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.address = ServerAddress("127.0.0.1", port, self._http.server_address[1])
        self._threads = [
            threading.Thread(target=self._run, daemon=True),
            threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._http.shutdown()
        self._http.server_close()
        for thread in self._threads:
            thread.join()
        self._socket.close(0)
        self._context.destroy(0)

    def __enter__(self) -> ScriptedServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._is_over.is_set():
            if not self._socket.poll(20):
                continue
            frames = self._socket.recv_multipart()
            operation = msgspec.msgpack.decode(frames[2])
            name = NAMES.get(operation, str(operation))
            self.calls.append(name)
            for answer in self.script(name, frames):
                self._socket.send_multipart(answer)

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        pages = self.pages

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = pages.get(self.path)
                self.send_response(404 if body is None else 200)
                self.end_headers()
                self.wfile.write(body or b"")

            def log_message(self, *words: object) -> None:
                pass

        return Handler
