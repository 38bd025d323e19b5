"""Object server in memory that implements the S3 calls of this library and fails as a test says.

Clients are distinguished by their access keys, so that the reads of one host alone can be damaged.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit
from xml.sax.saxutils import escape

_PIECE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Args:
        method: "GET", "PUT", "DELETE", "LIST".
        name: of the object, without its bucket.
        who: the access key of the client.
    """

    method: str
    name: str
    who: str


@dataclass(frozen=True, slots=True)
class Trouble:
    """What is done to a request instead of, or before, an answer.

    Args:
        status: sent at once, with an error body; 0: the request is carried out.
        damage: changes the bytes of an object on their way to the client.
        delay_s: waited before anything else.
        more_bytes: extra bytes after an answer.
        code: of the error; empty: the usual one of the status.
        message: of the error.
    """

    status: int = 0
    damage: Callable[[bytes], bytes] | None = None
    delay_s: float = 0.0
    more_bytes: int = 0
    code: str = ""
    message: str = "as the test says"


class Zeros:
    """An object of zeros that uses no memory.

    Args:
        num_bytes: size of the object.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


_CODES = {403: "AccessDenied", 404: "NoSuchBucket", 412: "PreconditionFailed", 503: "SlowDown", 507: "QuotaExceeded"}


class PlayedS3:
    """Listens on loopback until it is closed. `objects` may be changed by a test at any time.

    Args:
        trouble: called for each request; None: no trouble.
        port: to listen on; 0: any.
    """

    def __init__(self, trouble: Callable[[Request], Trouble | None] = lambda request: None, port: int = 0) -> None:
        self.objects: dict[str, bytes | Zeros] = {}
        self.trouble = trouble
        self.lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        """Requests by method."""
        self.sent_bytes = 0
        """Bytes of objects passed to the system."""
        played = self

        class Handler(_Handler):
            s3 = played

        self._http = _Server(("127.0.0.1", port), Handler)
        self.port: int = self._http.server_address[1]
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def settings(self, who: str = "owner") -> dict[str, str]:
        """Settings of a client with this access key."""
        endpoint = f"http://127.0.0.1:{self.port}"
        return {"endpoint": endpoint, "region": "us-east-1", "access_key_id": who, "secret_access_key": "played"}

    def names(self, part: str) -> list[str]:
        """Names of the objects that contain this part."""
        with self.lock:
            return sorted(name for name in self.objects if part in name)

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def __enter__(self) -> PlayedS3:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that stops reading is no error."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    s3: PlayedS3

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(6, 1, 1)  # TCP_NODELAY

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Logs nothing."""

    def do_GET(self) -> None:
        request = self._request("LIST" if "list-type" in self.path else "GET")
        trouble = self._troubled(request)
        if trouble is None:
            return
        if request.method == "LIST":
            self._list()
            return
        with self.s3.lock:
            found = self.s3.objects.get(request.name)
        if found is None:
            self._say(404, _error("NoSuchKey"))
            return
        size = found.num_bytes if isinstance(found, Zeros) else len(found)
        tag = f'"{size}"' if isinstance(found, Zeros) else f'"{hashlib.md5(found).hexdigest()}"'
        if self.headers.get("If-None-Match") == tag:
            self._say(304, b"", {"ETag": tag})
            return
        first, end, more = 0, size, {}
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            first, end = int(wanted[1]), min(size, int(wanted[2]) + 1)
            if first >= size:
                self._say(416, _error("InvalidRange"))
                return
            more = {"Content-Range": f"bytes {first}-{end - 1}/{size}"}
        more |= {"ETag": tag, "Last-Modified": self.date_time_string(1), "Accept-Ranges": "bytes"}
        self.send_response(206 if "Content-Range" in more else 200)
        for name, value in more.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(end - first + trouble.more_bytes))
        self.end_headers()
        for at in range(first, end, _PIECE_BYTES):
            stop = min(end, at + _PIECE_BYTES)
            data = bytes(stop - at) if isinstance(found, Zeros) else found[at:stop]
            self._send(trouble.damage(data) if trouble.damage else data)
        for at in range(0, trouble.more_bytes, _PIECE_BYTES):
            self._send(bytes(min(_PIECE_BYTES, trouble.more_bytes - at)))

    def _send(self, data: bytes) -> None:
        self.wfile.write(data)
        self.s3.sent_bytes += len(data)

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        request = self._request("PUT")
        if self._troubled(request) is None:
            return
        with self.s3.lock:
            is_present = request.name in self.s3.objects and self.headers.get("If-None-Match") == "*"
            if not is_present:
                self.s3.objects[request.name] = data
        if is_present:
            self._say(412, _error(_CODES[412]))
        else:
            self._say(200, b"", {"ETag": f'"{hashlib.md5(data).hexdigest()}"'})

    def do_POST(self) -> None:
        """Deletes many objects at once."""
        body = self.rfile.read(int(self.headers.get("Content-Length", "0"))).decode()
        names = re.findall("<Key>([^<]*)</Key>", body)
        if self._troubled(Request("DELETE", " ".join(names), self._who())) is None:
            return
        with self.s3.lock:
            for name in names:
                self.s3.objects.pop(name, None)
        deleted = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
        self._say(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    def do_DELETE(self) -> None:
        request = self._request("DELETE")
        if self._troubled(request) is None:
            return
        with self.s3.lock:
            self.s3.objects.pop(request.name, None)
        self._say(204, b"")

    def _list(self) -> None:
        prefix = unquote((re.findall("prefix=([^&]*)", self.path) or [""])[0])
        names = [name for name in self.s3.names(prefix) if name.startswith(prefix)]
        found = "".join(
            f"<Contents><Key>{escape(name)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f'<Size>1</Size><ETag>"1"</ETag></Contents>'
            for name in names
        )
        self._say(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>".encode())

    def _who(self) -> str:
        found = re.search("Credential=([^/]*)/", self.headers.get("Authorization", ""))
        return found[1] if found else ""

    def _request(self, method: str) -> Request:
        return Request(method, unquote(urlsplit(self.path).path).lstrip("/").partition("/")[2], self._who())

    def _troubled(self, request: Request) -> Trouble | None:
        """The trouble of the answer. None if the request was answered with an error."""
        with self.s3.lock:
            self.s3.counts[request.method] += 1
        trouble = self.s3.trouble(request) or Trouble()
        if trouble.delay_s:
            time.sleep(trouble.delay_s)
        if trouble.status:
            code = trouble.code or _CODES.get(trouble.status, "InternalError")
            self._say(trouble.status, _error(code, trouble.message, request.who))
            return None
        return trouble

    def _say(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        has_body = status not in (204, 304)
        if has_body:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if has_body:
            self.wfile.write(body)


def _error(code: str, message: str = "as the test says", who: str = "") -> bytes:
    """As servers send it: some repeat the access key."""
    said = f"<Code>{code}</Code><Message>{message}</Message><AWSAccessKeyId>{who}</AWSAccessKeyId>"
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<Error>{said}</Error>'.encode()
