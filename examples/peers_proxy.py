"""A proxy for two vLLM servers on one machine: the first prefills, the second decodes. For trying things, not for use.

    python peers_proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --port 8000

It knows no queue, no retry and no load: one thread a request, and whatever either server answers is passed on.
"""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MAX_BODY_BYTES = 16 << 20
TIMEOUT_S = 600.0
PATHS = ("/v1/completions", "/v1/chat/completions")


def ask(url: str, body: dict[str, Any]) -> tuple[int, bytes]:
    """Status and body of a server's answer."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def to_prefill(body: dict[str, Any]) -> dict[str, Any]:
    """The request that the first server computes and does not answer."""
    shorter = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    for name in ("max_tokens", "max_completion_tokens"):
        if name in shorter:
            shorter[name] = 1
    return shorter | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}


class Proxy(BaseHTTPRequestHandler):
    """Passes a request on, twice. `prefill` and `decode` are the servers' addresses."""

    prefill = ""
    decode = ""

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        if self.path not in PATHS or not 0 < length <= MAX_BODY_BYTES:
            self._answer(404, b'{"error": "POST /v1/completions or /v1/chat/completions"}')
            return
        body = json.loads(self.rfile.read(length))
        body["stream"] = False
        status, answer = ask(self.prefill + self.path, to_prefill(body))
        if status == 200:
            body["kv_transfer_params"] = json.loads(answer).get("kv_transfer_params")
            status, answer = ask(self.decode + self.path, body)
        self._answer(status, answer)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefill", default="http://127.0.0.1:8100")
    parser.add_argument("--decode", default="http://127.0.0.1:8200")
    parser.add_argument("--port", type=int, default=8000)
    chosen = parser.parse_args()
    Proxy.prefill, Proxy.decode = chosen.prefill, chosen.decode
    ThreadingHTTPServer(("127.0.0.1", chosen.port), Proxy).serve_forever()


if __name__ == "__main__":
    main()
