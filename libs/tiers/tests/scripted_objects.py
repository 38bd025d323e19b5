"""A server in memory that speaks as much S3 as the tier needs, and refuses what a test says with the error it says."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from hybridkv.tiers.object import Depot

Refused = tuple[int, str, str]
"""Status, code, and message."""
_ERROR = "<Error><Code>{}</Code><Message>{}</Message><AWSAccessKeyId>AKOWNER</AWSAccessKeyId></Error>"
_DECLARATION = '<?xml version="1.0" encoding="UTF-8"?>\n'


class ScriptedObjects:
    """The server. Listens on the loopback until it is closed.

    Args:
        refuse: what a request of this method is refused with; None: nothing.
    """

    def __init__(self, refuse: Callable[[str], Refused | None]) -> None:
        self.refuse = refuse
        self.objects: dict[str, bytes] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def depot(self, secret: bytes = b"s") -> Depot:
        settings = {"access_key_id": "AKOWNER", "secret_access_key": "SKOWNER", "region": "us-east-1"}
        return Depot(
            "s3://fleet/cache", {**settings, "endpoint": f"http://127.0.0.1:{self._server.server_port}"}, secret
        )

    def __enter__(self) -> ScriptedObjects:
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(script: ScriptedObjects) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), "ETag": '"1"', **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Last-Modified", "Wed, 25 Nov 2026 12:00:00 GMT")
            self.end_headers()
            self.wfile.write(body)

        def _fail(self, status: int, code: str, message: str) -> None:
            self._answer(status, (_DECLARATION + _ERROR.format(code, message)).encode(), Content_Type="application/xml")

        def _carry_out(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = urlsplit(self.path)
            query, name = parse_qs(parts.query, keep_blank_values=True), unquote(parts.path)
            refused = script.refuse(self.command)
            if refused is not None:
                self._fail(*refused)
            elif self.command == "PUT" and self.headers.get("If-None-Match") and name in script.objects:
                self._fail(412, "PreconditionFailed", "It is there.")
            elif self.command == "PUT":
                script.objects[name] = body
                self._answer(200)
            elif "list-type" in query:
                found = [each for each in script.objects if each.startswith(f"/fleet/{query['prefix'][0]}")]
                self._answer(200, _listed(found), Content_Type="application/xml")
            elif self.command == "POST":
                keys = re.findall("<Key>(.*?)</Key>", body.decode())
                for key in keys:
                    script.objects.pop(f"/fleet/{key}", None)
                deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
                self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode(), Content_Type="application/xml")
            elif name not in script.objects:
                self._fail(404, "NoSuchKey", "There is none.")
            else:
                self._give(script.objects[name])

        def _give(self, data: bytes) -> None:
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if asked is None:
                self._answer(200, data)
                return
            first, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
            self._answer(206, data[first : last + 1], Content_Range=f"bytes {first}-{last}/{len(data)}")

        do_GET = do_PUT = do_POST = do_DELETE = _carry_out  # noqa: N815

        def log_message(self, *words: Any) -> None:
            pass

    return Handler


def _listed(names: list[str]) -> bytes:
    contents = "".join(
        f"<Contents><Key>{name.removeprefix('/fleet/')}</Key><Size>1</Size>"
        "<LastModified>2026-11-25T12:00:00.000Z</LastModified></Contents>"
        for name in names
    )
    return f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>".encode()
