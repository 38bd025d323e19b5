"""A proxy for two vLLM servers on one machine: the first prefills, the second decodes. For trying things, not for use.

    python peers_proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --port 8000

It knows no queue, no retry and no load: one thread a request, and whatever either server answers is passed on when it
is whole, streams too.
"""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

MAX_BODY_BYTES = 16 << 20
TIMEOUT_S = 600.0
PATHS = ("/v1/completions", "/v1/chat/completions")
JSON = "application/json"
OF_THE_ANSWER = ("stream", "stream_options", "max_completion_tokens", "min_tokens", "n", "best_of")
"""Keys that say how to answer, which the first server does not. Each of `n` answers would hold blocks of its own."""


class Answer(NamedTuple):
    """Of a server, as it came."""

    status: int
    content_type: str
    body: bytes


def ask(url: str, body: dict[str, Any]) -> Answer:
    """What a server answers, once it has said all of it."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": JSON})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return Answer(response.status, response.headers.get("Content-Type", JSON), response.read())
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.headers.get("Content-Type", JSON), error.read())
    except OSError as error:
        return failed(502, f"{url}: {error}")


def failed(status: int, why: str) -> Answer:
    return Answer(status, JSON, json.dumps({"error": why}).encode())


def to_prefill(body: dict[str, Any]) -> dict[str, Any]:
    """The request that the first server computes and does not answer."""
    shorter = {name: value for name, value in body.items() if name not in OF_THE_ANSWER}
    return shorter | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}


def to_decode(body: dict[str, Any], prefilled: bytes) -> dict[str, Any]:
    """The request with what the first server said of its prompt."""
    return body | {"kv_transfer_params": json.loads(prefilled).get("kv_transfer_params")}


class Proxy(BaseHTTPRequestHandler):
    """Passes a request on, twice. `prefill` and `decode` are the servers' addresses."""

    prefill = ""
    decode = ""

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        if self.path not in PATHS or not 0 < length <= MAX_BODY_BYTES:
            self._answer(failed(404, f"POST {' or '.join(PATHS)}, of {MAX_BODY_BYTES} bytes at most"))
            return
        body = json.loads(self.rfile.read(length))
        answer = ask(self.prefill + self.path, to_prefill(body))
        if answer.status == 200:
            answer = ask(self.decode + self.path, to_decode(body, answer.body))
        self._answer(answer)

    def _answer(self, answer: Answer) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)


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
