"""Bytes that real engines hand over: what the connector counts of a request is what its table of groups says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import make_prompt, scratch_directory
from peer_pair import Pair, Variant

TRANSFER = {"kv_connector": "HybridNixlConnector"}
LENGTHS = (513, 1537, 4097)
MOST = 0.6
"""Of what would move if every layer were full attention: half of them are in gpt-oss, fewer in the others."""


@pytest.fixture(scope="module")
def pair(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = scratch_directory(tmp_path_factory.mktemp("bytes"))
    started = Pair(kind, {}, Variant(TRANSFER), directory / "bytes")
    try:
        for each in started.both:
            each.wait_until_ready()
        yield started
    finally:
        for each in started.both:
            each.end()


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_a_request_moves_what_the_table_of_groups_says(pair: Pair, num_tokens: int) -> None:
    before = pair.consumer.ask("traffic").get("bytes", 0)
    pair.decode_s(make_prompt(num_tokens, seed=num_tokens))
    moved = pair.consumer.ask("traffic")["bytes"] - before
    # The last token is left to the consumer.
    formula = pair.consumer.ask("formula", num_tokens=num_tokens - 1)
    assert moved == formula["per_group_bytes"]
    if num_tokens == max(LENGTHS):
        assert moved < MOST * formula["full_attention_bytes"], (
            "windows and states move a part of what full attention does"
        )
