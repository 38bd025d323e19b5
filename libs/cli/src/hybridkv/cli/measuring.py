"""Time to first token of a running server: cold, with a hit in its own cache, and restored from the tiers.

Uses OpenAI's completions API through the standard library. Prompts are random token ids, so no prompt is in a cache
before its first request, unless an earlier run had the same seed. A restore is measured if the server can reset its own
cache (VLLM_SERVER_DEV_MODE=1).
"""

from __future__ import annotations

import http.client
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from hybridkv.cli.output import ReportError
from hybridkv.connectors.errors import SettingProblem

TIMEOUT_S: Final = 600.0
TOKEN_IDS: Final = range(100, 1000)
"""Token ids of prompts. Every vocabulary has these ids."""
RESET_PAUSE_S: Final = 1.0
"""Pause before each try of a reset, so that stores can end."""
RESET_TRIES: Final = 10
COLD, OWN, RESTORED = "cold", "own", "restored"


class Measurement(msgspec.Struct, frozen=True):
    """One kind of request.

    Args:
        kind: "cold", "own" (a hit in the engine's own cache), or "restored" (a hit in the tiers).
        seconds: times to first token, in order.
        cached_tokens: cached prompt tokens that the server reports, of the request with the fewest; None without
            --enable-prompt-tokens-details.
    """

    kind: str
    seconds: list[float]
    cached_tokens: int | None

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


class BenchReport(msgspec.Struct, frozen=True):
    """Result of a measurement.

    Args:
        model: name of the served model.
        prompt_tokens: tokens of each prompt.
        measurements: by kind, cold first.
        tokens_per_second: prompt tokens that the engine computes in a second.
        verdict: text that says whether the tiers are worth it.
    """

    model: str
    prompt_tokens: int
    measurements: list[Measurement]
    tokens_per_second: float
    verdict: str


def measure(
    url: str, model: str | None, num_tokens: int, num_prompts: int, on_progress: Callable[[str], None], seed: int | None
) -> BenchReport:
    """Measures a server.

    Args:
        url: address of the server, with or without /v1.
        model: name of a served model; None for the first one.
        num_tokens: tokens of each prompt.
        num_prompts: number of prompts; each is sent once for each kind.
        on_progress: called with a line of text before each request.
        seed: seed of the random prompts; None for new prompts in each call.

    Raises:
        ReportError: the server cannot be reached, or refuses a request.
    """
    server = _Server(url)
    model, limit = server.model(model)
    if limit is not None and num_tokens >= limit:
        got, hint = f"{num_tokens} tokens", "lower --tokens"
        raise ReportError(SettingProblem("error", "--tokens", f"less than the {limit} tokens of {model}", got, hint))
    generator = random.Random(seed)
    prompts = [[generator.choice(TOKEN_IDS) for _ in range(num_tokens)] for _ in range(num_prompts)]
    on_progress("warming up")
    server.first_token(model, [generator.choice(TOKEN_IDS) for _ in range(num_tokens)])
    found = []
    for kind in (COLD, OWN, RESTORED):
        if kind == RESTORED and not server.reset():
            on_progress("the server cannot reset its cache, so no restore is measured")
            continue
        seconds, cached = [], list[int | None]()
        for number, prompt in enumerate(prompts, 1):
            on_progress(f"{kind}: prompt {number} of {num_prompts}")
            took_s, num_cached = server.first_token(model, prompt)
            seconds.append(took_s)
            cached.append(num_cached)
        known = [number for number in cached if number is not None]
        found.append(Measurement(kind, seconds, min(known) if len(known) == len(cached) else None))
    rate = num_tokens / found[0].median_s
    return BenchReport(model, num_tokens, found, rate, verdict(num_tokens, found, rate))


def verdict(num_tokens: int, found: list[Measurement], tokens_per_second: float) -> str:
    """Text that says whether the tiers are worth it, in one paragraph."""
    by_kind = {each.kind: each for each in found}
    cold_s, own_s = by_kind[COLD].median_s, by_kind[OWN].median_s
    words = [
        f"A new prompt of {num_tokens:,} tokens takes {_time(cold_s)} to its first token, "
        f"and {_time(own_s)} if the engine still has it."
    ]
    restored = by_kind.get(RESTORED)
    if restored is None:
        words.append(
            f"A hit in a tier lies between the two, so it can save at most {_time(max(0.0, cold_s - own_s))}. "
            "To measure it, start the server with VLLM_SERVER_DEV_MODE=1, and run this while it has no other request."
        )
    elif restored.cached_tokens == 0:
        words.append(
            "After a reset of its own cache the server restored nothing of at least one prompt, so this says nothing "
            "about the tiers. The prompt may be shorter than a chunk, or the server has no tier, or one that is too "
            "small."
        )
    elif restored.median_s >= 0.8 * cold_s:
        words.append(
            f"From the tiers it takes {_time(restored.median_s)}, so the tiers save little or nothing for prompts of "
            "this length. Try longer prompts with --tokens, and see why with the explain log."
        )
    else:
        words.append(
            f"From the tiers it takes {_time(restored.median_s)}: {cold_s / restored.median_s:.1f} times as fast as to "
            "compute it."
        )
        if len(restored.seconds) < 2 or max(restored.seconds) >= min(by_kind[COLD].seconds):
            words.append("The times overlap, or are too few: measure more with --prompts.")
        elif restored.cached_tokens is None:
            words.append("Start the server with --enable-prompt-tokens-details to see that it restored them.")
        else:
            words.append("For prompts of this length the tiers are worth it.")
    words.append(f"The engine computes {tokens_per_second:,.0f} tokens a second.")
    return " ".join(words)


def bench_text(report: BenchReport) -> str:
    """The report for people."""
    header = ("", "time to first token", "fastest", "slowest", "cached tokens")
    names = {COLD: "cold", OWN: "again, the engine's own hit", RESTORED: "restored from the tiers"}
    table = [header] + [
        (
            names[each.kind],
            _time(each.median_s),
            _time(min(each.seconds)),
            _time(max(each.seconds)),
            "unknown" if each.cached_tokens is None else f"{each.cached_tokens:,}",
        )
        for each in report.measurements
    ]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    lines = [
        "  ".join([f"{row[0]:<{widths[0]}}", *(f"{row[i]:>{widths[i]}}" for i in range(1, len(header)))])
        for row in table
    ]
    number = len(report.measurements[0].seconds)
    prompts = f"{number} prompt{'s' * (number > 1)} of {report.prompt_tokens:,} tokens"
    head = f"{report.model}: {prompts}, one after the other; median of each kind, fewest cached tokens"
    return "\n".join([head, "", *lines, "", report.verdict])


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


class _Server:
    """Client of a server with OpenAI's API."""

    def __init__(self, url: str) -> None:
        self._url = url
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ReportError(
                SettingProblem("error", "URL", "http://HOST:PORT", repr(url), "for example http://127.0.0.1:8000")
            )
        self._is_tls = parts.scheme == "https"
        self._host, self._port = parts.hostname, port
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")

    def model(self, name: str | None) -> tuple[str, int | None]:
        """Name and max_model_len of a served model; None if the server does not report max_model_len."""
        with self._request("GET", "/v1/models", None) as reply:
            served = {str(each["id"]): each.get("max_model_len") for each in json.loads(reply.read())["data"]}
        if name is None and served:
            name = next(iter(served))
        if name is None or name not in served:
            expected = f"one of {', '.join(served)}" if served else "a server that serves a model"
            raise ReportError(SettingProblem("error", "--model", expected, str(name or "none")))
        return name, served[name]

    def first_token(self, model: str, prompt: list[int]) -> tuple[float, int | None]:
        """Seconds to the first token of an answer, and number of cached tokens of the prompt; None if the server does
        not report this number."""
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        took_s, cached = None, None
        started_s = time.perf_counter()
        with self._request("POST", "/v1/completions", body) as reply:
            for line in reply:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if took_s is None and event.get("choices"):
                    took_s = time.perf_counter() - started_s
                details = (event.get("usage") or {}).get("prompt_tokens_details")
                cached = details.get("cached_tokens") if details else cached
        if took_s is None:
            raise ReportError(
                SettingProblem("error", self._url, "an answer with a token", "none", "see the log of the server")
            )
        return took_s, cached

    def reset(self) -> bool:
        """Clears the engine's own prefix cache, not the tiers. Tries `RESET_TRIES` times. False if the server does not
        do this."""
        for _ in range(RESET_TRIES):
            time.sleep(RESET_PAUSE_S)
            try:
                with self._request("POST", "/reset_prefix_cache?reset_external=false", {}) as reply:
                    if json.loads(reply.read() or b"{}").get("success", True):
                        return True
            except ReportError:
                return False
        return False

    @contextmanager
    def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=TIMEOUT_S)
        headers = {} if body is None else {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        try:
            connection.request(method, self._prefix + path, None if body is None else json.dumps(body), headers)
            reply = connection.getresponse()
            if reply.status != http.HTTPStatus.OK:
                words = f"{method} {path}: {reply.status} {reply.read(1000).decode(errors='replace')}"
                hint = "set OPENAI_API_KEY" if reply.status == http.HTTPStatus.UNAUTHORIZED else ""
                raise ReportError(
                    SettingProblem("error", self._url, "a server of OpenAI's API that answers", words, hint)
                )
            yield reply
        except (OSError, http.client.HTTPException) as error:
            words = f"{method} {path}: {type(error).__name__}: {error}"
            hint = "is the server up, and is this its address?"
            raise ReportError(SettingProblem("error", self._url, "a server of OpenAI's API", words, hint)) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ReportError):
                raise
            words = f"{method} {path}: {type(error).__name__}: {error}"
            raise ReportError(SettingProblem("error", self._url, "answers of OpenAI's API", words, "")) from error
        finally:
            connection.close()
