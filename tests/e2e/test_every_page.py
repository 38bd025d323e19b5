"""Random mixes of requests on a real engine: every loaded page, from any source, was stored under its key."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import harness
import msgspec
import patience
import pytest
from audit import stored_views
from harness import Engine, make_prompt
from noise import own_cache_only
from page_ledger import LOCAL, PageLedger

from hybridkv.connectors.vllm.offload.loads.local_blocks import LocalBlocks
from hybridkv.planner import GroupKind, LocalCopies

ROUNDS = int(os.environ.get("HYBRIDKV_E2E_ROUNDS", "30"))
SEED = int(os.environ.get("HYBRIDKV_E2E_SEED", "1"))
TIERS = os.environ.get("HYBRIDKV_E2E_TIERS", "ram,disk,object").split(",")
"""An object store never evicts, so with one no key is stored twice; without it, the same keys are stored again."""
RAM_BYTES, DISK_BYTES = 4 << 20, 10 << 20
LONGEST = 1500
"""Maximal tokens of a prompt."""
MOST_CHATS = 12


@pytest.fixture(scope="module")
def kv_transfer_config(tmp_path_factory: pytest.TempPathFactory, load: str) -> dict[str, Any]:
    directory: Path = harness.scratch_directory(tmp_path_factory.mktemp("tiers"))
    fleet, secret = directory / "fleet", directory / "secret"
    fleet.mkdir(mode=0o700)
    secret.write_text("every page " * 4)
    secret.chmod(0o600)
    tiers = [
        {"type": "ram", "capacity": RAM_BYTES},
        {"type": "disk", "path": str(directory / "kv"), "capacity": DISK_BYTES, "fsync": "none", "direct": False},
        {
            "type": "object",
            "url": f"file://{fleet}",
            "secret_file": str(secret),
            "cascade": "all",
            "lookup_timeout_seconds": patience.seconds(6.0),
        },
    ]
    # Every tier is worth its wait, so that all sources are read on fast and on slow machines.
    return {
        "kv_connector": "HybridOffloadConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "tiers": [tier for tier in tiers if tier["type"] in TIERS],
            "load": load,
            "weights_digest": "full",
            "load_timeout_seconds": patience.seconds(30.0),
            "compute_tokens_per_second": 1,
        },
    }


@pytest.fixture(scope="module")
def engine_arguments() -> dict[str, Any]:
    # Not enough blocks for four long requests, so some are preempted.
    return {"num_gpu_blocks_override": 96, "max_model_len": 2048}


@pytest.fixture(scope="module")
def all_pages(engine: Engine) -> PageLedger:
    return PageLedger(engine).attach()


@pytest.fixture
def ledger(engine: Engine, all_pages: PageLedger) -> Iterator[PageLedger]:
    """The ledger, with an engine that holds nothing of earlier tests."""
    engine.reset_prefix_cache()
    engine.connector.reset_cache()
    all_pages.loaded.clear()
    all_pages.earlier.clear()
    all_pages.wrong.clear()
    all_pages.loaded_keys.clear()
    all_pages.unstored = all_pages.failed_loads = 0
    num_free = engine.num_free_blocks
    yield all_pages
    engine.reset_prefix_cache()
    assert engine.num_free_blocks == num_free, "the connector kept blocks of the engine"


class Mix:
    """Random requests that continue, repeat and branch, some concurrent, some aborted; blocks are lost between
    rounds.
    """

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine, self._draw = engine, Random(seed)
        self._chats: list[list[int]] = []
        self._num_fresh = seed * 1_000_000

    def round(self) -> None:
        engine, draw = self._engine, self._draw
        asked: dict[str, list[int]] = {}
        for _ in range(draw.randint(1, 4)):
            prompt = self._prompt()
            asked[engine.add(prompt, max_tokens=draw.choice((1, 2, 20, 150)))] = prompt
            for _ in range(draw.choice((0, 0, 1, 3))):
                engine.step()
        for request_id in list(asked):
            if draw.random() < 0.08:
                engine.abort(request_id)
                asked.pop(request_id)
        engine.run()
        for request_id, prompt in asked.items():
            self._chats.append([*prompt, *engine.result(request_id).token_ids])
        while len(self._chats) > MOST_CHATS:
            self._chats.pop(draw.randrange(len(self._chats)))
        happening = draw.random()
        if happening < 0.5:
            engine.reset_prefix_cache()
        elif happening < 0.8:
            lose_states(engine)

    def _prompt(self) -> list[int]:
        draw = self._draw
        stem: list[int] = []
        if self._chats and draw.random() < 0.85:
            chat = draw.choice(self._chats)
            stem = chat[: draw.choice((len(chat), len(chat), draw.randrange(1, len(chat) + 1)))]
        self._num_fresh += 1
        fresh = draw.choice((1, 40, 128, draw.randrange(1, 700)))
        return make_prompt(min(len(stem) + fresh, LONGEST), seed=self._num_fresh, prefix=stem)


def has_states(engine: Engine) -> bool:
    """Whether the engine can hold attention beyond its deepest state."""
    return any(group.kind is GroupKind.RECURRENT for group in engine.connector._layout.spec.groups)


def lose_states(engine: Engine) -> None:
    """Make the engine lose unused states, so that it holds attention beyond its deepest state."""
    pool, groups = engine.scheduler.kv_cache_manager.block_pool, engine.connector._layout.spec.groups
    pool.evict_blocks(
        {
            block.block_id
            for block in pool.blocks
            if block.block_hash is not None
            and block.ref_cnt == 0
            and groups[int.from_bytes(block.block_hash[-4:], "big")].kind is GroupKind.RECURRENT
        }
    )


def test_each_loaded_page_was_stored_under_its_key(engine: Engine, ledger: PageLedger) -> None:
    mix = Mix(engine, SEED)
    for _ in range(ROUNDS):
        mix.round()
        assert ledger.wrong == []
    engine.drain()
    print(f"\n{ROUNDS} rounds: {ledger.summary()}")
    expected = {*TIERS, LOCAL} if has_states(engine) else set(TIERS)
    assert expected <= set(ledger.loaded), ledger.summary()


def test_either_version_of_bytes_stored_twice_under_a_key_may_be_loaded(engine: Engine, ledger: PageLedger) -> None:
    """The disk holds the version computed alone; memory holds the one computed beside another request, and loses it."""
    if "disk" not in TIERS:
        pytest.skip("no slower tier keeps the first version")
    prompt, beside, known = make_prompt(700, seed=500), make_prompt(300, seed=501), set(ledger.stored)
    engine.generate([prompt])
    keys = ledger.stored.keys() - known
    forget_memory(engine, keys)
    with own_cache_only(engine):
        engine.generate([beside, prompt])
    rewritten = [key for key in keys if len(set(ledger.stored[key])) > 1]
    if not rewritten:
        pytest.skip("this machine computes the same bytes in either batch")
    forget_memory(engine, keys)
    engine.generate([prompt])
    assert ledger.wrong == [] and ledger.loaded["disk"] > 0, ledger.summary()
    assert ledger.earlier["disk"] > 0, ledger.summary()


def forget_memory(engine: Engine, keys: Iterable[bytes]) -> None:
    """Make the engine and its host memory lose these keys. Slower tiers keep them."""
    engine.reset_prefix_cache()
    for key in keys:
        engine.connector._scheduler._stack.primary.invalidate(key)


def test_one_changed_byte_in_a_tier_is_detected(engine: Engine, ledger: PageLedger) -> None:
    """Control. The checksum is renewed, so the tier itself does not notice it."""
    prompt = make_prompt(400, seed=77)
    for _ in range(2):
        engine.generate([prompt])
        engine.reset_prefix_cache()
    assert ledger.wrong == []
    key = min(ledger.loaded_keys)
    for number, view in enumerate(stored_views(engine, key)):
        if number == 0:
            view[len(view) // 2] ^= 1
    engine.generate([prompt])
    assert [key.hex() in each for each in ledger.wrong] == [True], ledger.summary()


def test_a_copy_from_a_wrong_block_of_the_engine_is_detected(
    engine: Engine, ledger: PageLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control of local copies."""
    if not has_states(engine):
        pytest.skip("the engine never holds blocks beyond its own hit")
    find = LocalBlocks.find

    def turned(*arguments: Any) -> LocalCopies | None:
        found = find(*arguments)
        if found is None:
            return None
        ids = [each for each in found.block_ids if each]
        rest = iter([*ids[1:], *ids[:1]])
        return msgspec.structs.replace(found, block_ids=tuple(next(rest) if each else () for each in found.block_ids))

    prompt = make_prompt(700, seed=78)
    engine.generate([prompt])
    lose_states(engine)
    monkeypatch.setattr(LocalBlocks, "find", turned)
    engine.generate([prompt])
    assert ledger.loaded[LOCAL] > 1, ledger.summary()
    assert len(ledger.wrong) == ledger.loaded[LOCAL], ledger.summary()
