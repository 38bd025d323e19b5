"""`hybridkv bench` against a fake server that knows which prompts it has seen. A real one is in //tests/e2e."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hybridkv.cli import measuring
from hybridkv.cli.app import main
from hybridkv.cli.measuring import Measurement

COLD_S, OWN_S, RESTORED_S = 0.09, 0.01, 0.03


class FakeServer(ThreadingHTTPServer):
    """Server with a prefix cache and a tier below it."""

    def __init__(self, *, can_reset: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.can_reset = can_reset
        self.reset_reply: object = {"success": True}
        self.own: set[str] = set()
        self.stored: set[str] = set()
        self.paths: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._reply({"data": [{"id": "tiny", "max_model_len": 2048}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.paths.append(self.path)
        if self.path.startswith("/reset_prefix_cache"):
            if not self.server.can_reset:
                self.send_error(404)
                return
            self.server.own.clear()
            self._reply(self.server.reset_reply)
            return
        prompt = json.dumps(body["prompt"])
        seconds = OWN_S if prompt in self.server.own else RESTORED_S if prompt in self.server.stored else COLD_S
        self.server.own.add(prompt)
        self.server.stored.add(prompt)
        time.sleep(seconds)
        self.send_response(200)
        self.end_headers()
        cached = 0 if seconds == COLD_S else len(body["prompt"]) - 1
        for event in (
            {"choices": [{"text": "a"}]},
            {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": cached}}},
        ):
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def _reply(self, value: object) -> None:
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture(autouse=True)
def short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "RESET_PAUSE_S", 0.0)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[FakeServer]:
    played = FakeServer(can_reset=getattr(request, "param", True))
    thread = threading.Thread(target=played.serve_forever, daemon=True)
    thread.start()
    yield played
    played.shutdown()
    played.server_close()
    thread.join()


def run_bench(url: str, *options: str) -> Result:
    return CliRunner().invoke(main, ["bench", url, *options])


def test_cold_cached_and_restored_prompts_are_distinguished(server: FakeServer) -> None:
    result = run_bench(server.url + "/v1/", "--tokens", "600", "--prompts", "2", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    kinds = {each["kind"]: each for each in report["measurements"]}
    assert list(kinds) == ["cold", "own", "restored"]
    assert min(kinds["cold"]["seconds"]) >= COLD_S and min(kinds["restored"]["seconds"]) >= RESTORED_S
    assert [kinds[kind]["cached_tokens"] for kind in kinds] == [0, 599, 599]
    assert [len(each["seconds"]) for each in kinds.values()] == [2, 2, 2]
    assert report["tokens_per_second"] <= 600 / COLD_S
    assert "cold: prompt 2 of 2" in result.stderr
    assert server.paths.count("/reset_prefix_cache?reset_external=false") == 1


@pytest.mark.parametrize("server", [False], indirect=True)
def test_a_server_that_cannot_reset_its_cache_has_two_kinds(server: FakeServer) -> None:
    result = run_bench(server.url, "--tokens", "600", "--prompts", "1")
    assert result.exit_code == 0 and "restored from the tiers" not in result.stdout
    assert "VLLM_SERVER_DEV_MODE=1" in result.stdout and "no restore is measured" in result.stderr


def test_an_unknown_answer_to_a_reset_measures_no_restore(server: FakeServer) -> None:
    server.reset_reply = [True]
    result = run_bench(server.url, "--tokens", "600", "--prompts", "1")
    assert result.exit_code == 0 and "no restore is measured" in result.stderr


def test_the_text_report_has_a_table_and_a_paragraph(server: FakeServer) -> None:
    lines = run_bench(server.url, "--tokens", "600", "--prompts", "1").stdout.splitlines()
    assert lines[0] == "tiny: 1 prompt of 600 tokens, one after the other; median of each kind, fewest cached tokens"
    assert lines[2].split() == ["time", "to", "first", "token", "fastest", "slowest", "cached", "tokens"]
    assert [line.split()[0] for line in lines[3:6]] == ["cold", "again,", "restored"]
    assert lines[-1].startswith("A new prompt of 600 tokens takes ")


@pytest.mark.parametrize(
    ("restored_s", "cached_tokens", "words"),
    [
        ([0.5, 0.6, 0.5], 99, "4.0 times as fast as to compute it. For prompts of this length the tiers are worth it"),
        ([0.5, 2.5, 0.5], 99, "4.0 times as fast as to compute it. The times overlap"),
        ([0.5], 99, "or are too few: measure more"),
        ([0.5, 0.6, 0.5], None, "to see that it restored them"),
        ([0.5, 0.6, 0.5], 0, "restored nothing of at least one prompt"),
        ([1.9, 1.9, 1.9], 99, "save little or nothing"),
    ],
)
def test_the_verdict_depends_on_times_and_cached_tokens(
    restored_s: list[float], cached_tokens: int | None, words: str
) -> None:
    restored = Measurement("restored", restored_s, cached_tokens)
    found = [Measurement("cold", [2.0, 2.1, 1.8], 0), Measurement("own", [0.1], 99), restored]
    said = measuring.verdict(8000, found, 4000.0)
    assert "takes 2.00 s to its first token, and 100 ms" in said and words in said
    assert "4,000 tokens a second" in said


def test_an_unusable_server_or_option_is_refused(server: FakeServer) -> None:
    assert "less than the 2048 tokens of tiny" in run_bench(server.url, "--tokens", "2048").stderr
    assert "--model: expected one of tiny" in run_bench(server.url, "--model", "other").stderr
    for url in ("ftp://host", "localhost:99999", "http://127.0.0.1:abc", "http://[::1"):
        assert "URL: expected http://HOST:PORT" in run_bench(url).stderr
    result = run_bench("http://127.0.0.1:1")
    assert result.exit_code == 2 and "is the server up" in result.stderr
