"""Beside LMCache's own connector: for the same requests the same tokens and the same blocks are stored and retrieved.

Recorded by `record_lmcache_calls.py`, because LMCache and vLLM cannot be installed beside each other.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from hybridkv.lmcache.geometry import Geometry, PageGroup, cut_tables, storable
from hybridkv.planner import GroupSpec

GOLDEN = sorted((Path(__file__).parent / "golden").glob("lmcache_calls_*.json"))


def _asked(geometry: Geometry, tables: dict[int, list[int]], start: int, end: int) -> dict[str, Any] | None:
    if start == end:
        return None
    cut = dict(zip(geometry.order, cut_tables(geometry, tables, start, end), strict=True))
    runs = [[cut[group][0], cut[group][-1], len(cut[group])] for group in range(len(cut))]
    return {"start": start, "end": end, "blocks": runs}


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_the_same_tokens_and_blocks_are_asked_for_as_lmcache_asks_for(path: Path) -> None:
    golden = json.loads(path.read_text())
    num_stores = num_retrieves = 0
    for case in golden["cases"]:
        blocks = golden["groups"][case["groups"]]
        # What LMCache's connector says of windows and states does not change which blocks it sends.
        geometry = Geometry(tuple(PageGroup(GroupSpec("full", size), 64) for size in blocks), golden["chunk"])
        whole = {group: list(range(1, 1 + -(-case["tokens"] // size))) for group, size in enumerate(blocks)}
        retrieve = None
        if case["found"] > case["local"]:
            start = case["local"] // golden["chunk"] * golden["chunk"]
            retrieve = _asked(geometry, whole, start, case["found"])
        assert retrieve == case["retrieve"]
        num_retrieves += retrieve is not None
        for step in case["steps"]:
            tables = {group: whole[group][:length] for group, length in enumerate(step["lengths"])}
            store = _asked(geometry, tables, *storable(geometry, tables, step["stored"], step["computed"]))
            assert store == step["call"]
            num_stores += store is not None
    assert num_stores > 100
    assert num_retrieves > 10


def test_both_versions_are_recorded_and_ask_for_the_same() -> None:
    recorded = [json.loads(path.read_text()) for path in GOLDEN]
    assert [each.pop("lmcache") for each in recorded] == ["0.5.6", "0.5.7rc2"]
    assert recorded[0] == recorded[1]
