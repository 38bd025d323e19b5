"""Chunks that are no multiple of the groups' blocks: the engine never reads a wrong byte, and some of them are of use.

The CPU's attention backend keeps K by columns, so on a real engine here no block is ever cut. The oracle's memory is
laid out as a GPU's, so the connector is told that this is one: of that and of the backend's name, and of nothing else.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.connectors.vllm import CONNECTOR, cuts, lowering, register
from oracle.mixes import GEMMA3, GPT_OSS, Group, Kind, Layers, Mix
from oracle.profile import profile
from oracle.scenarios import Scenario, Tally, mixes, run, scenarios, with_connector
from oracle.settings import Connector

if TYPE_CHECKING:
    from hybridkv.canonical import GroupPages
    from hybridkv.connectors.vllm.messages import Move

CAPACITY = "64MiB"
THREE_SIZES = Mix(
    "three_sizes",
    (
        Group(Kind.RECURRENT, 12, (Layers(2, cell_bytes=392),), page_bytes=512),
        Group(Kind.WINDOW, 16, (Layers(2, cell_bytes=16),), reach_tokens=20, page_bytes=512),
        Group(Kind.FULL, 24, (Layers(2, cell_bytes=16),), page_bytes=512),
    ),
)
"""A state every 12 tokens beside blocks of 16 and 24; all of them end together only every 48."""


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    settled = cuts.part_tokens
    gpu: Any = SimpleNamespace(device_config=SimpleNamespace(device_type="cuda"))
    monkeypatch.setattr(cuts, "part_tokens", lambda config, *facts: settled(gpu, *facts))
    monkeypatch.setattr(cuts, "DIVISIBLE_BACKENDS", frozenset({"an unknown backend"}))


def offload(chunk_tokens: int, load: str = "async") -> Connector:
    tiers = [{"type": "ram", "capacity": CAPACITY}]
    return Connector(CONNECTOR, {"chunk_tokens": chunk_tokens, "tiers": tiers, "load": load})


def _hashing(scenario: Scenario, hash_tokens: int | None) -> Scenario:
    """With block hashes, by which chunks are named, that are finer than a block."""
    return replace(scenario, settings=replace(scenario.settings, hash_tokens=hash_tokens))


def cut_chunks(mix: Mix, unit: int) -> st.SearchStrategy[int]:
    """Multiples of the unit that are none of all groups' blocks."""
    most = max(3, 2 * mix.alignment_tokens // unit)
    chunks = [unit * n for n in range(1, most + 1)]
    return st.sampled_from([chunk for chunk in chunks if chunk % mix.alignment_tokens])


@pytest.mark.parametrize("load", ["async", "sync"])
@pytest.mark.parametrize("mix", [GEMMA3, GPT_OSS], ids=lambda mix: mix.name)
def test_chunks_that_end_inside_blocks_never_corrupt(mix: Mix, load: str) -> None:
    tally = Tally()

    @profile(160)
    @given(scenarios(mix, st.booleans()), st.sampled_from((1, 2, 4)), st.data())
    def check(scenario: Scenario, hash_tokens: int, data: st.DataObject) -> None:
        connector = offload(data.draw(cut_chunks(mix, hash_tokens)), load)
        tally.add(run(mix, with_connector(_hashing(scenario, hash_tokens), connector)))

    check()
    assert tally.with_restored > tally.scenarios // 5, tally


def test_states_stay_whole_beside_blocks_that_are_cut() -> None:
    tally = Tally()

    @profile(200)
    @given(scenarios(THREE_SIZES), cut_chunks(THREE_SIZES, 12))
    def check(scenario: Scenario, chunk_tokens: int) -> None:
        tally.add(run(THREE_SIZES, with_connector(scenario, offload(chunk_tokens))))

    check()
    assert tally.with_restored > tally.scenarios // 5, tally


def test_cut_chunks_of_random_mixes_never_corrupt() -> None:
    tally = Tally()
    cut = 0

    @profile(300)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        nonlocal cut
        mix = data.draw(mixes())
        scenario = data.draw(scenarios(mix, st.booleans()))
        whole = [group.block_tokens for group in mix.groups if group.kind in (Kind.RECURRENT, Kind.CHUNKED)]
        if whole or len({group.block_tokens for group in mix.groups}) == 1:
            return
        unit = min(group.block_tokens for group in mix.groups)
        chunk_tokens = data.draw(cut_chunks(mix, unit))
        cut += 1
        tally.add(run(mix, with_connector(scenario, offload(chunk_tokens))))

    check()
    assert cut > 20
    assert tally.with_restored > tally.scenarios // 8, tally


# Connectors that are wrong about a cut on purpose. The oracle must see each of them, or it proves nothing.


def begin_a_token_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a chunk has of its blocks is taken to lie one unit further on, where it is loaded."""
    pieces = lowering.cut_runs_of

    def shifted(move: Move, blocks: Any, extents: Any, to_engine: bool) -> Any:
        if to_engine and move.lead_tokens and not move.trail_tokens:
            unit = move.lead_tokens // 2
            wrong = msgspec.structs.replace(move, lead_tokens=move.lead_tokens - unit, trail_tokens=unit)
            return pieces(wrong, blocks, extents, to_engine)
        return pieces(move, blocks, extents, to_engine)

    monkeypatch.setattr("hybridkv.connectors.vllm.worker.cut_runs_of", shifted)


def forget_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a chunk has of its last block is taken for what the next one has of it."""
    part = lowering.GroupBlocks.of

    def other(blocks: lowering.GroupBlocks, start: int, end: int) -> GroupPages:
        size = blocks._block_tokens
        return part(blocks, size - end, size - start)

    monkeypatch.setattr(lowering.GroupBlocks, "of", other)


WRONG = {f.__name__: f for f in (begin_a_token_late, forget_the_cut)}
