"""Bytes transferred between real engines: the connector counts as many as the group table predicts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import make_prompt, scratch_directory
from peer_pair import Pair, Variant

TRANSFER = {"kv_connector": "HybridNixlConnector"}
LENGTHS = (513, 1537, 4097)
MOST = 0.6
"""Largest fraction of the bytes that would move if every layer were full attention; gpt-oss has half of them, others
fewer.
"""


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
def test_a_request_transfers_the_bytes_of_the_group_table(pair: Pair, num_tokens: int) -> None:
    before = pair.consumer.ask("traffic").get("bytes", 0)
    pair.decode_s(make_prompt(num_tokens, seed=num_tokens))
    moved = pair.consumer.ask("traffic")["bytes"] - before
    # The consumer computes the last token.
    formula = pair.consumer.ask("formula", num_tokens=num_tokens - 1)
    assert moved == formula["per_group_bytes"]
    if num_tokens == max(LENGTHS):
        assert moved < MOST * formula["full_attention_bytes"], (
            "windows and states transfer only a part of the bytes of full attention"
        )
