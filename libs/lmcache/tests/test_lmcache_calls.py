"""Compared with LMCache's own connector: the same tokens and blocks are stored and retrieved for the same requests.

Recorded by `record_lmcache_calls.py`, because LMCache and vLLM cannot be installed together.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from hybridkv.lmcache.geometry import Geometry, PageGroup, cut_tables, storable
from hybridkv.planner import GroupSpec

GOLDEN = sorted((Path(__file__).parent / "golden").glob("lmcache_calls_*.json"))


def _our_call(geometry: Geometry, tables: dict[int, list[int]], start: int, end: int) -> dict[str, Any] | None:
    if start == end:
        return None
    cut = dict(zip(geometry.order, cut_tables(geometry, tables, start, end), strict=True))
    runs = [[cut[group][0], cut[group][-1], len(cut[group])] for group in range(len(cut))]
    return {"start": start, "end": end, "blocks": runs}


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_calls_have_the_tokens_and_blocks_of_lmcaches_connector(path: Path) -> None:
    golden = json.loads(path.read_text())
    num_stores = num_retrieves = 0
    for case in golden["cases"]:
        blocks = golden["groups"][case["groups"]]
        # The windows and states that LMCache's connector declares do not change which blocks it sends.
        geometry = Geometry(tuple(PageGroup(GroupSpec("full", size), 64) for size in blocks), golden["chunk"])
        whole = {group: list(range(1, 1 + -(-case["tokens"] // size))) for group, size in enumerate(blocks)}
        retrieve = None
        if case["found"] > case["local"]:
            start = case["local"] // golden["chunk"] * golden["chunk"]
            retrieve = _our_call(geometry, whole, start, case["found"])
        assert retrieve == case["retrieve"]
        num_retrieves += retrieve is not None
        for step in case["steps"]:
            tables = {group: whole[group][:length] for group, length in enumerate(step["lengths"])}
            store = _our_call(geometry, tables, *storable(geometry, tables, step["stored"], step["computed"]))
            assert store == step["call"]
            num_stores += store is not None
    assert num_stores > 100
    assert num_retrieves > 10


def test_both_recorded_versions_make_the_same_calls() -> None:
    recorded = [json.loads(path.read_text()) for path in GOLDEN]
    assert [each.pop("lmcache") for each in recorded] == ["0.5.6", "0.5.7rc2"]
    assert recorded[0] == recorded[1]
