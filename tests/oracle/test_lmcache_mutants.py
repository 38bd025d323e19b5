"""Controls of the tests with LMCache servers: a connector with one fault is found."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

import msgspec
import pytest

from hybridkv.connectors.vllm import register
from hybridkv.connectors.vllm.common.blocks.blocks import BlockPins
from hybridkv.connectors.vllm.lmcache import (
    load_handler,
    load_tracker,
    pages,
    session,
    session_spec,
    store_handler,
    store_tracker,
)
from hybridkv.connectors.vllm.lmcache.load_handler import LoadHandler
from hybridkv.connectors.vllm.lmcache.session import PageLease
from hybridkv.connectors.vllm.lmcache.store_tracker import StoreTracker
from hybridkv.lmcache.operations import LookupHandle
from hybridkv.planner import GroupKind, Transfer
from oracle import lmcache_runs
from oracle.engine import LeakError, OracleEngine
from oracle.lmcache_runs import at, reach, require_idle, until_idle, watch_loads
from oracle.lmcache_servers import VERSIONS, Server, Sort, fleet_of
from oracle.mixes import GEMMA3, GPT_OSS, QWEN3_NEXT, Mix
from oracle.runner import CorruptionError, OracleError
from oracle.settings import EngineSettings

CHUNKS = 6
SOON_S = 1.0
"""Shorter wait for leaks that are certain."""


@pytest.fixture(scope="module", params=VERSIONS)
def server(request: pytest.FixtureRequest) -> Server:
    register()
    return fleet_of(request.param, request.config)[Sort.APART]


def tokens(num_tokens: int, seed: int) -> list[int]:
    generator = Random(seed)
    return [generator.randrange(200) for _ in range(num_tokens)]


def run_two_engines(mix: Mix, server: Server, **changed: Any) -> list[OracleEngine]:
    """Two engines of one identity: each finds the chunks of the other, whole or after a local prefix."""
    server.begin()
    chunk = server.sort.chunk_tokens
    long = tokens(CHUNKS * chunk + 1, 1)
    sibling = [*long[: 3 * chunk + 5], *tokens(2 * chunk, 2)]
    pool_chunks = changed.pop("pool_chunks", None)
    connector = at(server, mix, uuid.uuid4().hex, pool_chunks)
    settings = EngineSettings(num_blocks=700, max_step_tokens=chunk, retention_tokens=None, connector=connector)
    count = itertools.count()
    with OracleEngine(mix, replace(settings, **changed)) as first, OracleEngine(mix, settings) as second:
        engines = [first, second]
        for engine in engines:
            assert reach(engine)
            watch_loads(engine)

        def ask(engine: OracleEngine, *prompts: list[int], keeps: bool = False) -> None:
            if not keeps:
                engine.reset_prefix_cache()
            for prompt in prompts:
                engine.submit(f"request{next(count)}", prompt, 3)
            until_idle(engines)
            for each in engines:
                require_idle(each)
            if not server.is_at_rest():
                raise LeakError(f"the server keeps {server.held()}")

        ask(first, long, tokens(CHUNKS * chunk, 3))
        ask(first, long)
        ask(second, sibling)
        ask(first, long[: chunk + mix.alignment_tokens + 1])
        ask(first, long, sibling, keeps=True)
        ask(second, long, sibling, tokens(CHUNKS * chunk, 3))
    return engines


Patch = pytest.MonkeyPatch


def damage(patch: Patch) -> None:
    """Half of the stored pages change at the server."""
    seal, random = session.seal_pages, Random(0)

    def seal_and_damage(parts: Any, session_spec: Any, lease: PageLease, *rest: Any) -> None:
        seal(parts, session_spec, lease, *rest)
        if random.random() < 0.5:
            part = random.choice(parts.parts)
            row = lease.memory.groups[part.group][random.choice(lease.taken.blocks[part.group])]
            row[session.HEADER_BYTES + 1] ^= 1

    patch.setattr(store_handler, "seal_pages", seal_and_damage)


def headers_are_not_read(patch: Patch) -> None:
    patch.setattr(load_handler, "bad_pages", lambda *_: [])


def answers_are_of_other_groups(patch: Patch) -> None:
    """The server swaps the pages of the first two groups, whose specs are equal."""
    check = LoadHandler._check

    def swap_and_check(self: LoadHandler, load: Any, lease: PageLease, job: Any) -> str | None:
        ours, theirs = lease.memory.groups[:2]
        for first, second in zip(lease.taken.blocks.get(0, ()), lease.taken.blocks.get(1, ()), strict=False):
            ours[first], theirs[second] = theirs[second].copy(), ours[first].copy()
        return check(self, load, lease, job)

    patch.setattr(LoadHandler, "_check", swap_and_check)


def answers_are_of_other_blocks(patch: Patch) -> None:
    """The server writes each page of a chunk one place further."""
    tables, found, is_load = pages.block_tables, LoadHandler._found, []

    def rotated(geometry: Any, parts: Any, taken: Any) -> list[list[int]]:
        told: list[list[int]] = tables(geometry, parts, taken)
        for table, group in zip(told, geometry.order, strict=True):
            size = geometry.blocks_per_chunk[group]
            for first in range(0, len(table) if is_load else 0, size):
                chunk = table[first : first + size]
                if pages.NULL_BLOCK not in chunk:
                    table[first : first + size] = [*chunk[1:], chunk[0]]
        return told

    def finding(self: LoadHandler, *arguments: Any) -> None:
        is_load.append(True)
        try:
            found(self, *arguments)
        finally:
            is_load.pop()

    patch.setattr(LoadHandler, "_found", finding)
    patch.setattr(session, "block_tables", rotated)


def answers_are_of_other_prompts(patch: Patch) -> None:
    """For the server every prompt is the same."""
    patch.setattr(session_spec, "prefix_words", lambda digests, chunk: b"".join(bytes(4 * chunk) for _ in digests))


def identities_leave_out(patch: Patch, digest: bool = False, group: bool = False, block: bool = False) -> None:
    identify = session_spec.page_identity

    def identity(of: bytes, index: int, at: int) -> bytes:
        return identify(b"" if digest else of, 0 if group else index, 0 if block else at)

    patch.setattr(session_spec, "page_identity", identity)


def window_is_one_block_short(patch: Patch) -> None:
    plan = load_tracker.plan_load

    def short(spec: Any, *rest: Any) -> list[Transfer]:
        found = list(plan(spec, *rest))
        for i, each in enumerate(found):
            if spec.groups[each.group_index].kind is GroupKind.WINDOW:
                found[i] = Transfer(each.group_index, each.end_token, each.first_block + 1, each.block_ids[1:])
                break
        return found

    patch.setattr(load_tracker, "plan_load", short)


def loads_write_what_the_engine_has(patch: Patch) -> None:
    plan = load_tracker.plan_load
    patch.setattr(load_tracker, "plan_load", lambda spec, boundary, computed, *rest: plan(spec, boundary, 0, *rest))


def stores_of_equal_groups_are_swapped(patch: Patch) -> None:
    plan = store_tracker.store_copies

    def swapped(*arguments: Any, **more: Any) -> Any:
        return [
            msgspec.structs.replace(copy, group_index={0: 1, 1: 0}.get(copy.group_index, copy.group_index))
            for copy in plan(*arguments, **more)
        ]

    patch.setattr(store_tracker, "store_copies", swapped)


def stores_begin_a_chunk_too_early(patch: Patch) -> None:
    plan = StoreTracker._attention

    def early(self: StoreTracker, tracked: Any, known: int, final: int, tables: Any) -> Any:
        chunk, request = self._spec.chunk_tokens, tracked.request
        tracked.stored_tokens = min(tracked.stored_tokens, final)
        ahead = min(final + chunk, request.num_tokens)
        return plan(self, tracked, known, ahead, lambda name: [[*table, 1, 1, 1, 1, 1, 1] for table in tables(name)])

    patch.setattr(StoreTracker, "_attention", early)


def states_are_stored_a_chunk_too_early(patch: Patch) -> None:
    plan = store_tracker.state_copies

    def early(*arguments: Any) -> Any:
        return [msgspec.structs.replace(copy, chunk=max(0, copy.chunk - 1)) for copy in plan(*arguments)]

    patch.setattr(store_tracker, "state_copies", early)


def blocks_are_not_pinned(patch: Patch) -> None:
    patch.setattr(BlockPins, "pin", lambda self, block_ids: [self._pool.blocks[at] for at in block_ids])
    patch.setattr(BlockPins, "free", lambda self, blocks: None)


def loads_end_when_they_begin(patch: Patch) -> None:
    begin = LoadHandler.begin

    def early(self: LoadHandler, load: Any) -> None:
        tell = self.__dict__.setdefault("_tell", self._on_ended)
        self._on_ended = lambda *_: None
        tell(load.request_id, ())
        begin(self, load)

    patch.setattr(LoadHandler, "begin", early)


def answers_are_not_given_back(patch: Patch) -> None:
    patch.setattr(LookupHandle, "drop", lambda *_: None)
    patch.setattr("oracle.lmcache_servers.SETTLED_S", SOON_S)


def pages_are_not_given_back(patch: Patch) -> None:
    patch.setattr(PageLease, "drop", lambda *_: None)
    patch.setattr(lmcache_runs, "SETTLED_S", SOON_S)


class Mutant(NamedTuple):
    spoil: Callable[[Patch], None]
    mix: Mix
    shows_as: type[OracleError] = CorruptionError
    fault: Callable[[Patch], None] | None = None
    """Another fault, which without the mutant costs loads but no byte."""
    changed: dict[str, Any] = {}  # noqa: RUF012


def without_digests(patch: Patch) -> None:
    identities_leave_out(patch, digest=True)


def without_groups(patch: Patch) -> None:
    identities_leave_out(patch, group=True)


def without_blocks(patch: Patch) -> None:
    identities_leave_out(patch, block=True)


MUTANTS = (
    Mutant(headers_are_not_read, GPT_OSS, fault=damage),
    Mutant(without_digests, GPT_OSS, fault=answers_are_of_other_prompts),
    Mutant(without_groups, GEMMA3, fault=answers_are_of_other_groups),
    Mutant(without_blocks, GPT_OSS, fault=answers_are_of_other_blocks),
    Mutant(window_is_one_block_short, GPT_OSS),
    Mutant(loads_write_what_the_engine_has, GPT_OSS, OracleError),
    Mutant(stores_of_equal_groups_are_swapped, GEMMA3),
    Mutant(stores_begin_a_chunk_too_early, GPT_OSS),
    Mutant(states_are_stored_a_chunk_too_early, QWEN3_NEXT),
    Mutant(blocks_are_not_pinned, GPT_OSS, changed={"pool_chunks": 1, "num_blocks": 64}),
    Mutant(loads_end_when_they_begin, GPT_OSS),
    Mutant(answers_are_not_given_back, GPT_OSS, LeakError),
    Mutant(pages_are_not_given_back, GPT_OSS, LeakError),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.spoil.__name__)
def test_every_fault_of_a_connector_is_found(mutant: Mutant, server: Server, monkeypatch: Patch) -> None:
    if mutant.fault is not None:
        mutant.fault(monkeypatch)
        engines = run_two_engines(mutant.mix, server, **mutant.changed)
        assert sum(engine.failed_loads for engine in engines) > 0, "the fault alone costs loads"
    mutant.spoil(monkeypatch)
    with pytest.raises(mutant.shows_as):
        run_two_engines(mutant.mix, server, **mutant.changed)


@pytest.mark.parametrize("mix", [GPT_OSS, GEMMA3, QWEN3_NEXT], ids=lambda mix: mix.name)
def test_a_connector_without_faults_passes(mix: Mix, server: Server) -> None:
    engines = run_two_engines(mix, server)
    assert sum(engine.failed_loads for engine in engines) == 0
    assert all(engine.restored_tokens > 0 for engine in engines)
