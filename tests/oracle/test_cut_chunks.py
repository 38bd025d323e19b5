"""Chunks that are no multiple of the groups' blocks: no wrong byte is ever read, and some of them give hits.

The CPU's attention backend stores K by columns, so a real engine here never cuts a block. The oracle's memory is laid
out as a GPU's, so the tests pretend a GPU for this decision and allow the backend's name; everything else is real.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm import CONNECTOR, register
from hybridkv.connectors.vllm.common.copies.lowering import GroupBlocks
from hybridkv.connectors.vllm.common.specs import cuts
from hybridkv.connectors.vllm.offload import worker
from hybridkv.planner import GroupKind, Transfer, resume_start
from kits import plain_lowering
from oracle.engine import OracleEngine
from oracle.mixes import DEEPSEEK_V4, GEMMA3, GPT_OSS, HEADS_BEFORE_LAYERS, Group, Kind, Layers, Mix
from oracle.planned import change_loads
from oracle.profile import profile
from oracle.rings import LOADS
from oracle.runner import CorruptionError
from oracle.scenarios import Scenario, Tally, mixes, run, scenarios, with_connector
from oracle.settings import Connector, EngineSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from hybridkv.canonical import GroupPages, TokenRange
    from hybridkv.connectors.vllm.common.copies.table import ChunkCopy
    from hybridkv.planner import CacheSpec
    from hybridkv.transfer import CopyRuns

CAPACITY = "64MiB"
THREE_SIZES = Mix(
    "three_sizes",
    (
        Group(Kind.RECURRENT, 12, (Layers(2, cell_bytes=392),), page_bytes=512),
        Group(Kind.WINDOW, 16, (Layers(2, cell_bytes=16),), reach_tokens=20, page_bytes=512),
        Group(Kind.FULL, 24, (Layers(2, cell_bytes=16),), page_bytes=512),
    ),
)
"""A state every 12 tokens beside blocks of 16 and 24; all end together only every 48 tokens."""


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
    """With block hashes, which name the chunks, that are finer than a block."""
    return replace(scenario, settings=replace(scenario.settings, hash_tokens=hash_tokens))


def cut_chunks(mix: Mix, unit: int) -> st.SearchStrategy[int]:
    """Multiples of the unit that are not whole blocks of every group."""
    most = max(3, 2 * mix.alignment_tokens // unit)
    chunks = [unit * n for n in range(1, most + 1)]
    return st.sampled_from([chunk for chunk in chunks if chunk % mix.alignment_tokens])


@pytest.mark.parametrize("load", LOADS)
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
    @given(scenarios(THREE_SIZES), st.sampled_from((12, 24, 36, 60)))
    def check(scenario: Scenario, chunk_tokens: int) -> None:
        tally.add(run(THREE_SIZES, with_connector(scenario, offload(chunk_tokens))))

    check()
    assert tally.with_restored > tally.scenarios // 10, tally


def test_cut_chunks_of_random_mixes_never_corrupt() -> None:
    tally = Tally()
    cut = 0

    @profile(60, whole=True)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        nonlocal cut
        mix = data.draw(mixes((Kind.FULL, Kind.WINDOW), is_packed=True))
        scenario = data.draw(scenarios(mix, st.booleans()))
        if len({group.block_tokens for group in mix.groups}) == 1:
            return
        unit = min(group.block_tokens for group in mix.groups)
        chunk_tokens = data.draw(cut_chunks(mix, unit))
        cut += 1
        tally.add(run(mix, with_connector(scenario, offload(chunk_tokens))))

    check()
    assert cut > 20
    assert tally.with_restored > tally.scenarios // 8, tally


# Connectors that cut wrongly on purpose. The oracle must find each of them, or it proves nothing.


def load_a_token_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of a chunk in its first block is written to the tokens before."""
    right = plain_lowering.cut_load_runs

    def wrong(copy: ChunkCopy, blocks: GroupBlocks, extents: Any) -> CopyRuns:
        if copy.lead_tokens:
            copy = msgspec.structs.replace(copy, lead_tokens=copy.lead_tokens - 4, trail_tokens=copy.trail_tokens + 4)
        return right(copy, blocks, extents)

    monkeypatch.setattr(plain_lowering, "cut_load_runs", wrong)
    monkeypatch.setattr(worker, "JobLowering", plain_lowering.PlainLowering)


def store_the_other_end_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of a chunk in a block is counted from the block's end when it is stored."""
    right = plain_lowering.cut_store_runs

    def wrong(copy: ChunkCopy, blocks: GroupBlocks, extents: Any, zeros: Any) -> CopyRuns:
        def other_end(tokens: TokenRange) -> GroupPages:
            return blocks.of(tokens.block_tokens - tokens.end, tokens.block_tokens - tokens.start)

        return right(copy, GroupBlocks(blocks.pages, blocks.block_tokens, other_end), extents, zeros)

    monkeypatch.setattr(plain_lowering, "cut_store_runs", wrong)
    monkeypatch.setattr(worker, "JobLowering", plain_lowering.PlainLowering)


def take_the_state_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads the recurrent state of the boundary before the right one."""

    def wrong(spec: CacheSpec, num_tokens: int, transfers: list[Transfer]) -> list[Transfer]:
        return [
            Transfer(each.group_index, each.end_token - spec.chunk_tokens, each.first_block, each.block_ids)
            if spec.groups[each.group_index].kind is GroupKind.RECURRENT
            else each
            for each in transfers
        ]

    change_loads(monkeypatch, wrong)


@pytest.mark.parametrize(
    ("mix", "chunk_tokens", "hash_tokens", "make_wrong"),
    [
        (GEMMA3, 12, 4, load_a_token_early),
        (GPT_OSS, 20, 4, load_a_token_early),
        (GEMMA3, 4, 4, store_the_other_end_of_a_block),
        (GPT_OSS, 12, 4, store_the_other_end_of_a_block),
        (THREE_SIZES, 12, None, take_the_state_before),
        (THREE_SIZES, 36, None, store_the_other_end_of_a_block),
    ],
    ids=lambda value: getattr(value, "name", None) or getattr(value, "__name__", str(value)),
)
@pytest.mark.parametrize("is_wrong", [True, False], ids=["wrong", "right"])
def test_a_wrong_cut_is_caught(
    mix: Mix,
    chunk_tokens: int,
    hash_tokens: int | None,
    make_wrong: Callable[[pytest.MonkeyPatch], None],
    is_wrong: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if is_wrong:
        make_wrong(monkeypatch)
    # Every state is kept, so that the one before the right one is stored as well.
    settings = EngineSettings(
        num_blocks=200,
        max_step_tokens=16,
        retention_tokens=None,
        hash_tokens=hash_tokens,
        connector=offload(chunk_tokens),
    )
    with OracleEngine(mix, settings) as engine:
        engine.submit("cold", list(range(100)), 2)
        engine.drain()
        engine.reset_prefix_cache()
        engine.submit("warm", list(range(100)), 2)
        if is_wrong:
            with pytest.raises(CorruptionError):
                engine.drain()
        else:
            engine.drain()
            # The engine offers states of 36 and 96 tokens, and none of 72.
            expected = 36 if chunk_tokens == 36 else 99 // chunk_tokens * chunk_tokens
            assert engine.restored_tokens == expected


SHORT_WINDOW = Mix("short_window", (Group(Kind.WINDOW, 8, reach_tokens=9), Group(Kind.FULL, 8)))


@pytest.mark.parametrize("is_wrong", [True, False], ids=["wrong", "right"])
def test_a_block_filled_only_as_far_as_its_window_reads_is_caught(
    is_wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine keeps the block under its hash, and reads the rest of it for the next request that ends earlier."""
    if is_wrong:
        coverage = import_module("hybridkv.planner.coverage")
        monkeypatch.setattr(coverage, "load_start", lambda group, end, held: max(resume_start(group, end), held))
    settings = EngineSettings(num_blocks=200, max_step_tokens=16, hash_tokens=1, connector=offload(11))
    with OracleEngine(SHORT_WINDOW, settings) as engine:
        engine.submit("cold", list(range(100)), 2)
        engine.drain()
        engine.reset_prefix_cache()
        # At 44 the window begins at 36, in the block of 32 to 40, of which the last chunk has all but the first token.
        engine.submit("warm", list(range(45)), 2)
        engine.drain()
        assert engine.restored_tokens == 44
        engine.submit("local", [*range(43), 99, 99], 2)
        if is_wrong:
            with pytest.raises(CorruptionError, match=r"group 0 .* cell 32 "):
                engine.drain()
        else:
            engine.drain()
            assert engine.local_hit_tokens == 44 + 40 and engine.restored_tokens == 44


# Refused chunks.


@pytest.mark.parametrize(
    ("mix", "chunk_tokens", "hash_tokens", "unit", "hint"),
    [
        (THREE_SIZES, 16, None, 12, 'use 12, or "auto"'),
        (THREE_SIZES, 48 * 200 + 1, None, 12, 'use 4092, or "auto"'),
        (GEMMA3, 6, 4, 4, 'use 4, or "auto"'),
        (GEMMA3, 12, None, 8, 'use 8, or "auto"'),
        (HEADS_BEFORE_LAYERS, 8, None, 16, 'use 16, or "auto"'),
        (DEEPSEEK_V4, 64, None, 128, 'use 128, or "auto"'),
    ],
)
def test_a_chunk_without_gain_is_refused_with_one_that_works(
    mix: Mix, chunk_tokens: int, hash_tokens: int | None, unit: int, hint: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        start(mix, chunk_tokens, hash_tokens)
    assert caught.value.path == "kv_connector_extra_config.chunk_tokens" and caught.value.got == chunk_tokens
    assert f"a multiple of {unit} tokens" in caught.value.expected and caught.value.hint == hint


def test_no_block_is_cut_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    register()
    with pytest.raises(ConfigurationError, match="a multiple of 8 tokens"):
        start(GEMMA3, 12, 4)


def test_an_unknown_attention_backend_is_not_trusted_with_a_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "DIVISIBLE_BACKENDS", frozenset({"FLASH_ATTN"}))
    start(GEMMA3, 16, 4)
    with pytest.raises(ConfigurationError) as caught:
        start(GEMMA3, 12, 4)
    assert "an unknown backend (model.layers.0.0.0)" in str(caught.value.got)
    assert caught.value.hint == "use a multiple of 8, which cuts no block"


def start(mix: Mix, chunk_tokens: int, hash_tokens: int | None) -> None:
    settings = EngineSettings(num_blocks=64, hash_tokens=hash_tokens, connector=offload(chunk_tokens))
    with OracleEngine(mix, settings):
        pass
