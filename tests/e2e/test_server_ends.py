"""A server that is stopped kills its engine, vLLM's default. The next server finds the stored chunks and restores
them.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import patience
import pytest
import server as servers

from hybridkv.tiers.disk.format import changes, snapshot

KIND = "qwen3-next"
CHUNK_TOKENS = 128
PROMPT_TOKENS = 700
RESTORABLE_TOKENS = (PROMPT_TOKENS - 1) // CHUNK_TOKENS * CHUNK_TOKENS
NUM_RECORDS = RESTORABLE_TOKENS // CHUNK_TOKENS + 3
"""The chunks of the full-attention group, and the last state of each recurrent group."""
OPENING = re.compile(r"opened in [\d.]+ s \((\d+) of (\d+) segments and (\d+) changes read\)")


@dataclass(frozen=True)
class Life:
    """The answer and the log of one server."""

    completion: Any
    log: str

    @property
    def cached_tokens(self) -> int:
        return int(self.completion["usage"]["prompt_tokens_details"]["cached_tokens"])

    @property
    def opening(self) -> tuple[int, int, int]:
        """Segments read, segments in total, changes read."""
        [found] = OPENING.findall(self.log)
        read, segments, num_changes = map(int, found)
        return read, segments, num_changes


def is_recorded(cache: Path) -> bool:
    """Whether all begun records are committed and recorded for the next start.

    On a slow machine a snapshot may be taken in between; later changes are in the log after it.
    """
    try:
        [namespace] = cache.glob("[0-9a-f]*")
        base = (namespace / "snapshot").read_bytes()
        data = (namespace / "changes").read_bytes()
    except (ValueError, FileNotFoundError):
        return False
    name = bytes.fromhex(namespace.name)
    saved, decoded = snapshot.decode(base, name), changes.decode(data, name, snapshot.checksum_of(base))
    if saved is None or decoded is None or not decoded.is_whole:
        return False
    begun = {change.address for change in decoded.changes if isinstance(change, changes.Reserved)} | {*saved.pending}
    ended = {change.address for change in decoded.changes if isinstance(change, changes.Committed)}
    return begun <= ended and len(ended | {*saved.addresses}) == NUM_RECORDS


def live(directory: Path, *, until_written: bool) -> Life:
    cache = directory / "cache"
    tiers = [{"type": "ram", "capacity": "64MiB"}, {"type": "disk", "path": str(cache), "capacity": "1GiB"}]
    config = {
        "kv_connector": "HybridOffloadConnector",
        "kv_connector_module_path": "hybridkv.connectors.vllm.offload.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"tiers": tiers, "chunk_tokens": CHUNK_TOKENS},
    }
    path = os.pathsep.join(part for part in sys.path if part)
    life = directory / "server"
    with servers.running_server(Path(sys.executable), KIND, life, config, PYTHONPATH=path) as server:
        completion = server.complete(harness.make_prompt(PROMPT_TOKENS, seed=1))
        if until_written:
            patience.wait_until(lambda: is_recorded(cache), "all chunks are recorded on disk")
    return Life(completion, server.log.read_text())


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Life, Life]:
    directory = harness.scratch_directory(tmp_path_factory.mktemp("ends"))
    harness.prepare_environment(directory / "environment")
    first = live(directory, until_written=True)
    print(first.log)
    second = live(directory, until_written=False)
    print(second.log)
    return first, second


def test_the_engine_was_killed(lives: tuple[Life, Life]) -> None:
    """Control: the disk tier was not closed, so no final snapshot was written."""
    assert "force killing remaining process" in lives[0].log


def test_the_start_warns_about_the_cost_of_a_sudden_end(lives: tuple[Life, Life]) -> None:
    assert "shutdown_timeout is 0, so a server kills its engine" in lives[0].log


def test_the_next_start_reads_no_segment(lives: tuple[Life, Life]) -> None:
    read, segments, _ = lives[1].opening
    assert (read, lives[0].opening[1]) == (0, 0)
    assert segments > 0


def test_the_next_server_restores_chunks_stored_by_the_killed_one(lives: tuple[Life, Life]) -> None:
    cold, warm = lives
    assert (cold.cached_tokens, warm.cached_tokens) == (0, RESTORABLE_TOKENS)
    assert warm.completion["choices"][0]["logprobs"] == cold.completion["choices"][0]["logprobs"]
