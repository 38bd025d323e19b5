"""A proxy for two vLLM servers on one machine: the first prefills, the second decodes. An example, not for production.

    python peers_proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --port 8000

The proxy has no queue, no retries and no load balancing, and one thread for each request. It passes an answer on when
the whole answer has arrived, also if the client requested a stream.
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
ANSWER_KEYS = ("stream", "stream_options", "max_completion_tokens", "min_tokens", "n", "best_of")
"""Keys of a request that the first server does not get, because it computes no answer. With `n`, each of the answers
would hold its own blocks."""


class Answer(NamedTuple):
    """Answer of a server, unchanged."""

    status: int
    content_type: str
    body: bytes


def ask(url: str, body: dict[str, Any]) -> Answer:
    """Sends a request to a server. Returns its whole answer, or an answer with status 502 if the server cannot be
    reached."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": JSON})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return Answer(response.status, response.headers.get("Content-Type", JSON), response.read())
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.headers.get("Content-Type", JSON), error.read())
    except OSError as error:
        return error_answer(502, f"{url}: {error}")


def error_answer(status: int, why: str) -> Answer:
    return Answer(status, JSON, json.dumps({"error": why}).encode())


def to_prefill(body: dict[str, Any]) -> dict[str, Any]:
    """Request for the first server: it computes the prompt, and one token that the proxy drops."""
    shorter = {name: value for name, value in body.items() if name not in ANSWER_KEYS}
    return shorter | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}


def to_decode(body: dict[str, Any], prefilled: bytes) -> dict[str, Any]:
    """Request for the second server: the client's request, with `kv_transfer_params` of the first server's answer."""
    return body | {"kv_transfer_params": json.loads(prefilled).get("kv_transfer_params")}


class Proxy(BaseHTTPRequestHandler):
    """Sends each request to the server `prefill`, then to the server `decode`. If the first does not answer with status
    200, its answer is passed on."""

    prefill = ""
    decode = ""

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        if self.path not in PATHS or not 0 < length <= MAX_BODY_BYTES:
            self._answer(error_answer(404, f"POST {' or '.join(PATHS)}, of {MAX_BODY_BYTES} bytes at most"))
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
