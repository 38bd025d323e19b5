"""An engine continues when a server of LMCache is killed or stops answering during a request.

All answers equal the computed ones, and the server serves again after it returns. One engine in the test's process. A
stopped server answers nothing and keeps its connections, so requests wait until their own deadline.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import patience
import pytest
from equality import require_close, require_same, require_same_output
from harness import Engine, Result, make_prompt
from lmcache_site import CHUNK_TOKENS, ENGINE_ARGUMENTS, LMCacheSite, prompt_lengths
from lmcache_witness import Link, LMCacheAudit
from noise import Noise

from hybridkv.lmcache.operations import Operations
from kits.lmcache.server_process import eventually

_SEEDS = itertools.count(1000, 1000)
MANY_STEPS = 50
"""Steps during which a request waits for a silent server. No step may block."""


@pytest.fixture(scope="module")
def kv_transfer_config(site: LMCacheSite) -> dict[str, Any]:
    return site.transfer()


@pytest.fixture(scope="module")
def engine_arguments(kind: str) -> dict[str, Any]:
    return ENGINE_ARGUMENTS.get(kind, {})


@pytest.fixture(scope="module")
def watching(engine: Engine) -> LMCacheAudit:
    audit = LMCacheAudit(engine)
    audit.attach()
    return audit


@pytest.fixture(scope="module")
def link(engine: Engine, site: LMCacheSite) -> Link:
    return Link(engine, site)


@pytest.fixture
def prompt(kind: str) -> list[int]:
    """A prompt that no other test uses."""
    return make_prompt(prompt_lengths(kind)[1], seed=next(_SEEDS))


@pytest.fixture(autouse=True)
def a_server(site: LMCacheSite, link: Link) -> Iterator[None]:
    """A working server, no matter what the test before has done."""
    if not eventually(lambda: all(link.states), patience.seconds(0.5)):
        site.restart()
    link.require_up()
    yield
    site.thaw()


class Moment:
    """Runs an action right before an operation of the connector begins for the first time.

    Args:
        monkeypatch: ends the patch with the test.
        operation: a method of `Operations`.
        action: called once, on the thread that begins the operation.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, operation: str, action: Callable[[], None]) -> None:
        self._has_come = threading.Event()
        self._has_begun = False
        self._lock = threading.Lock()
        inner = getattr(Operations, operation)

        def outer(*arguments: Any, **named: Any) -> Any:
            with self._lock:
                is_first, self._has_begun = not self._has_begun, True
                if is_first:
                    action()
            result = inner(*arguments, **named)
            if is_first:
                self._has_come.set()
            return result

        monkeypatch.setattr(Operations, operation, outer)

    def wait(self, engine: Engine) -> None:
        """Step until the operation has begun."""
        while not self._has_come.is_set():
            engine.step()


def finish(engine: Engine, request_id: str) -> Result:
    engine.run()
    engine.drain()
    return engine.result(request_id)


def restorable(kind: str, prompt: list[int]) -> int:
    return (len(prompt) - 1) // CHUNK_TOKENS[kind] * CHUNK_TOKENS[kind]


def require_hits_again(link: Link, audit: LMCacheAudit, prompt: list[int], cold: Result, kind: str) -> None:
    """The server is back, and missing chunks are stored there again."""
    engine = link.engine
    link.require_up()
    engine.reset_prefix_cache()
    require_same_output([cold], engine.generate([prompt]))
    link.settle()
    engine.reset_prefix_cache()
    audit.forget()
    warm = engine.generate([prompt])
    require_same(audit, [cold], warm)
    assert warm[0].num_cached_tokens == restorable(kind, prompt)


def test_a_server_killed_during_a_store(
    link: Link, audit: LMCacheAudit, prompt: list[int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, site = link.engine, link.site
    moment = Moment(monkeypatch, "store", site.freeze)
    request_id = engine.add(prompt)
    moment.wait(engine)
    assert link.num_pages_under_way > 0
    site.kill()
    stored = finish(engine, request_id)
    link.require_down()
    engine.reset_prefix_cache()  # fails if a block is pinned
    computed = engine.generate([prompt])[0]
    assert computed.num_cached_tokens == 0
    require_same_output([computed], [stored])
    site.start()
    require_hits_again(link, audit, prompt, computed, kind)


@pytest.mark.parametrize("operation", ["lookup", "retrieve"])
def test_a_server_killed_during_a_lookup_or_retrieve(
    link: Link,
    audit: LMCacheAudit,
    prompt: list[int],
    kind: str,
    operation: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, site = link.engine, link.site
    cold = engine.generate([prompt])[0]
    link.settle()
    engine.reset_prefix_cache()
    audit.forget()
    moment = Moment(monkeypatch, operation, site.freeze)
    request_id = engine.add(prompt)
    moment.wait(engine)
    for _ in range(MANY_STEPS):
        engine.step()
    assert engine.status(request_id) in ("WAITING", "WAITING_FOR_REMOTE_KVS"), "it did not wait"
    site.kill()
    warm = finish(engine, request_id)
    require_same_output([cold], [warm])
    assert (audit.restored_tokens, audit.mismatches) == (0, [])
    assert audit.failed_loads == (operation == "retrieve")
    engine.reset_prefix_cache()
    site.start()
    require_hits_again(link, audit, prompt, cold, kind)


def test_a_server_killed_during_requests_with_shared_prefixes(link: Link, audit: LMCacheAudit, kind: str) -> None:
    """Eight concurrent requests; at that moment some are finished, some load and some wait."""
    engine, site = link.engine, link.site
    seed, length = next(_SEEDS), prompt_lengths(kind)[1]
    stems = [make_prompt(2 * CHUNK_TOKENS[kind], seed=seed + i) for i in range(2)]
    prompts = [make_prompt(length, seed=seed + 10 + i, prefix=stems[i % 2]) for i in range(8)]
    cold = [engine.generate([prompt])[0] for prompt in prompts]
    link.settle()
    engine.reset_prefix_cache()
    names = [engine.add(prompt) for prompt in prompts]
    while not any(engine.status(name) == "RUNNING" for name in names):
        engine.step()
    site.kill()
    engine.run()
    engine.drain()
    require_close(audit, cold, [engine.result(name) for name in names], Noise(engine))
    engine.reset_prefix_cache()
    site.start()
    require_hits_again(link, audit, prompts[2], cold[2], kind)


def test_a_silent_server_is_given_up_and_used_again_after_it_recovers(
    link: Link, audit: LMCacheAudit, prompt: list[int], kind: str
) -> None:
    """It accepts every byte. The heartbeat detects the silence; after that no request waits."""
    engine, site = link.engine, link.site
    cold = engine.generate([prompt])[0]
    link.settle()
    site.freeze()
    link.require_down()
    engine.reset_prefix_cache()
    again = engine.generate([prompt])[0]
    assert again.num_cached_tokens == 0
    require_same_output([cold], [again])
    engine.reset_prefix_cache()
    site.thaw()
    require_hits_again(link, audit, prompt, cold, kind)
