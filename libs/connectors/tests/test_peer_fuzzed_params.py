"""Mutated `kv_transfer_params` are refused within bounds or lead to valid reads only.

`FUZZ_SECONDS` extends the run.
"""

from __future__ import annotations

import json
import os

import msgspec

from hybridkv.connectors.hosts import LOOPBACK, AllowedHosts
from hybridkv.connectors.vllm.nixl.params import ParamsError, RankAddress, RemotePrompt, compose, parse
from hybridkv.connectors.vllm.nixl.prompts import require_blocks, usable_tokens
from hybridkv.peers.comparison import Agreement, compare
from hybridkv.peers.description import PROTOCOL, Axis, Description, GroupDescription, LayerDescription, Piece
from hybridkv.peers.errors import Incompatibility
from hybridkv.peers.leases import Lease
from hybridkv.peers.pairing import Exchange, Resume
from hybridkv.peers.tables import BlockTables, offered
from hybridkv.planner import GroupKind, GroupSpec
from kits.peers.fuzzing import Target, bounded_memory, fuzz

SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
NUM_INPUTS = 2000
MEMORY_BYTES = 1 << 30
NUM_TOKENS, NUM_BLOCKS = 18, 16
GROUPS = (
    GroupSpec(GroupKind.FULL, 4),
    GroupSpec(GroupKind.WINDOW, 4, window_tokens=6),
    GroupSpec(GroupKind.CHUNKED, 4, align_tokens=8),
)
TABLES = tuple(tuple(range(1 + 5 * group, 6 + 5 * group)) for group in range(3))
PIECE = Piece(0, 0, 32, 8, units=Axis(4, 8))
ENGINE = Description(
    PROTOCOL,
    "engine",
    {},
    0,
    1,
    NUM_BLOCKS,
    (32 * NUM_BLOCKS,),
    tuple(GroupDescription(spec, (LayerDescription("layer", "plain", (PIECE,)),)) for spec in GROUPS),
)
HOSTS = AllowedHosts(LOOPBACK)
AGREEMENT = compare(ENGINE, ENGINE)
assert isinstance(AGREEMENT, Agreement)
EXCHANGE = Exchange(AGREEMENT)


def _prompt() -> RemotePrompt:
    kept = offered(GROUPS, TABLES, NUM_TOKENS)
    ranks = (RankAddress(14579, "engine.0"), RankAddress(14580, "engine.1"))
    return RemotePrompt(
        *("engine", "cmpl-1", "127.0.0.1", ranks, NUM_TOKENS, kept.block_ids, kept.first_blocks, (4, 4, 4)),
        *(Lease(3, 1 << 40), 30.0, NUM_TOKENS, "a digest"),
    )


def _params(data: bytes) -> None:
    try:
        params = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not isinstance(params, dict):
        return
    prompt = parse(params)
    assert prompt.host.isprintable() and all(rank.name.isprintable() for rank in prompt.ranks)
    assert isinstance(prompt.host in HOSTS, bool)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(prompt), type=RemotePrompt) == prompt
    num_tokens = usable_tokens(GROUPS, prompt, NUM_TOKENS + 1, 1)
    assert 0 <= num_tokens <= NUM_TOKENS
    require_blocks(GROUPS, prompt, num_tokens, 0)
    remote = BlockTables(prompt.num_tokens, prompt.first_blocks, prompt.block_ids)
    pairing = EXCHANGE.pair(BlockTables.whole(NUM_TOKENS, TABLES), remote, Resume(num_tokens))
    if not isinstance(pairing, Incompatibility):
        ends = pairing.ranges.remote_offsets + pairing.ranges.num_bytes
        assert bool((pairing.ranges.remote_offsets >= 0).all()) and bool((ends <= ENGINE.region_bytes[0]).all())


TARGET = Target("kv_transfer_params", (json.dumps(compose(_prompt())).encode(),), _params, (ParamsError,))


def test_mutated_params_are_refused_within_bounds() -> None:
    with bounded_memory(MEMORY_BYTES):
        assert fuzz(TARGET, SEED, NUM_INPUTS, SECONDS) >= NUM_INPUTS
