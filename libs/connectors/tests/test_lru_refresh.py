"""A long path becomes recent a part in each step, and in the end stands as if all of it had been touched at once."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_lookups import FULL
from test_prefix_chain import CHUNK, MOST_CHUNKS, WINDOW, World

from hybridkv.connectors.vllm.common.requests import PrefixChain
from hybridkv.connectors.vllm.offload import lru_refresh
from hybridkv.connectors.vllm.offload.lru_refresh import STEP_KEYS, STEP_SHARE, RefreshQueue
from hybridkv.tiers.ram import RamIndex
from hybridkv.tiers.stack import TierStack


def stack_of(keys: list[bytes]) -> TierStack:
    """A tier that holds these, the first of them the least recently used."""
    index = RamIndex(16 * len(keys), 16)
    index.reserve_all([(key, 16) for key in keys])
    index.commit_all(keys)
    return TierStack(index, (), 1, lambda: 0.0)


def order_of(stack: TierStack) -> list[bytes]:
    index = stack.primary_only
    assert isinstance(index, RamIndex)
    return index.eviction_order()


def named(num_keys: int, name: str = "") -> list[bytes]:
    return [f"{name}{number:06}".encode() for number in range(num_keys)]


def test_a_short_path_is_recent_at_once() -> None:
    keys = named(STEP_KEYS)
    stack = stack_of([*keys, b"other"])
    RefreshQueue(stack).refresh(PrefixChain(), keys[::-1])
    assert order_of(stack) == [b"other", *keys[::-1]]


def test_no_step_touches_more_than_its_part_of_a_long_path() -> None:
    keys = named(3 * STEP_KEYS + 1)
    stack = stack_of([*keys, b"other"])
    made = RefreshQueue(stack)
    with mock.patch.object(stack, "touch", wraps=stack.touch) as touch:
        made.refresh(PrefixChain(), keys[::-1])
        assert not touch.call_args_list
        for _ in range(5):
            made.advance()
        assert [len(call.args[0]) for call in touch.call_args_list] == [STEP_KEYS] * 3 + [1]
    assert order_of(stack) == [b"other", *keys[::-1]]


def test_what_waits_becomes_less_however_many_paths_end_together() -> None:
    paths = [named(STEP_KEYS + 1, f"{number} ") for number in range(64)]
    stack = stack_of([key for keys in paths for key in keys])
    made = RefreshQueue(stack)
    for keys in paths:
        made.refresh(PrefixChain(), keys)
    with mock.patch.object(stack, "touch", wraps=stack.touch) as touch:
        made.advance()
        assert sum(len(call.args[0]) for call in touch.call_args_list) == 64 * (STEP_KEYS + 1) // STEP_SHARE
        for _ in range(STEP_SHARE * 4):
            made.advance()
    assert order_of(stack) == [key for keys in paths for key in keys]


def test_a_path_that_is_renewed_again_is_touched_in_its_latest_order() -> None:
    keys = named(3 * STEP_KEYS)
    stack = stack_of(keys)
    path, made = PrefixChain(), RefreshQueue(stack)
    made.refresh(path, keys)
    made.advance()
    with mock.patch.object(stack, "touch", wraps=stack.touch) as touch:
        made.refresh(path, keys[::-1])
        made.finish()
        assert sum(len(call.args[0]) for call in touch.call_args_list) == len(keys)
    assert order_of(stack) == keys[::-1]


def test_nothing_is_touched_that_was_forgotten() -> None:
    keys = named(2 * STEP_KEYS)
    stack = stack_of(keys)
    made = RefreshQueue(stack)
    made.refresh(PrefixChain(), keys[::-1])
    made.clear()
    made.finish()
    assert order_of(stack) == keys


@given(st.integers(1, 7), st.integers(1, MOST_CHUNKS), st.booleans())
def test_a_request_leaves_the_tiers_in_the_same_order_however_small_the_steps_are(
    step_keys: int, num_chunks: int, is_closed: bool
) -> None:
    worlds = [World([FULL, WINDOW], 60, 60, looks_at_each=False) for _ in range(2)]
    for world, most in zip(worlds, (STEP_KEYS, step_keys), strict=True):
        with mock.patch.object(lru_refresh, "STEP_KEYS", most):
            world.begin(0, 0, 0)
            for _ in range(num_chunks):
                world.compute(0, CHUNK)
                world.end_store()
            while world.stack.has_live_moves():
                world.end_move()
            world.finish(0)
            if is_closed:
                world.planner.close()
            else:
                for _ in range(4 * MOST_CHUNKS):
                    world.planner.advance()
    orders = [[index.eviction_order() for index in (world.near, world.far)] for world in worlds]
    assert orders[0] == orders[1] and orders[0][0]


def test_the_comparison_sees_a_path_of_which_a_part_was_never_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = []
    for finish in (RefreshQueue.finish, lambda self: None):
        monkeypatch.setattr(RefreshQueue, "finish", finish)
        world = World([FULL], 60, 0, looks_at_each=False)
        with mock.patch.object(lru_refresh, "STEP_KEYS", 2):
            world.begin(0, 0, 0)
            for _ in range(MOST_CHUNKS):
                world.compute(0, CHUNK)
                world.end_store()
            world.finish(0)
            world.planner.close()
        orders.append(world.near.eviction_order())
    assert orders[0] != orders[1]
