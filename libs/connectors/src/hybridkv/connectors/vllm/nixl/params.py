"""`kv_transfer_params`: description of a finished prompt that a producer returns and a proxy carries to a consumer.

The keys are the same as in vLLM's NixlConnector, so that its proxies work unchanged. Keys that only hybridkv uses are
under `hybridkv`. Unknown keys are ignored, because proxies add keys. A proxy may send any value: a known key with a
wrong value is refused with a reason, and the consumer computes the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hybridkv.peers.leases import MAX_NONCE, NO_NONCE, Lease

VERSION = 1
OURS = "hybridkv"
MAX_RANKS = 64
"""Maximum ranks of a producer. A request makes an engine connect to each rank."""
MAX_GROUPS = 256
MAX_BLOCKS = 1 << 22
MAX_NAME = 512


class RankAddress(msgspec.Struct, frozen=True, array_like=True):
    """Address of one rank of a producer.

    Args:
        port: port on the producer's host.
        name: name of the rank, new at each start of its process. A consumer refuses any other name at this port.
    """

    port: int
    name: str


class RemotePrompt(msgspec.Struct, frozen=True, array_like=True):
    """A prompt that a producer has computed and holds.

    Args:
        engine_id: id of the producer.
        request_id: id of the request at the producer.
        host: host of the producer's ranks.
        ranks: addresses of the producer's ranks, in order.
        num_tokens: tokens that the blocks hold.
        block_ids: for each group, blocks in token order; 0 for no block.
        first_blocks: for each group, the index in its block table at which `block_ids` begins.
        block_tokens: for each group, the producer's block size in tokens.
        lease: lease on the blocks.
        lease_seconds: duration of the lease without a renewal.
        prefix_tokens: number of tokens that `prefix` digests, from the beginning of the prompt.
        prefix: digest of these tokens.
    """

    engine_id: str
    request_id: str
    host: str
    ranks: tuple[RankAddress, ...]
    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    first_blocks: tuple[int, ...]
    block_tokens: tuple[int, ...]
    lease: Lease
    lease_seconds: float
    prefix_tokens: int
    prefix: str


class ParamsError(ValueError):
    """Wrong `kv_transfer_params`: the prompt cannot be loaded.

    Args:
        key: the wrong key.
        found: description of the error.
    """

    def __init__(self, key: str, found: str) -> None:
        super().__init__(f"kv_transfer_params.{key}: {found}")
        self.key = key


def is_remote_decode(params: Any) -> bool:
    """True if a consumer will load the blocks of this request."""
    return isinstance(params, Mapping) and params.get("do_remote_decode") is True


def is_remote_prefill(params: Any) -> bool:
    """True if a request loads blocks that a producer has computed.

    Never raises: a client can put any value here with `vllm_xargs`, and an exception would end the engine.
    """
    return isinstance(params, Mapping) and params.get("do_remote_prefill") is True


def compose(prompt: RemotePrompt) -> dict[str, Any]:
    """Builds the parameters that a producer returns. All values are plain, because proxies send them as JSON."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": prompt.engine_id,
        "remote_request_id": prompt.request_id,
        "remote_host": prompt.host,
        "remote_port": prompt.ranks[0].port,
        "remote_block_ids": [list(ids) for ids in prompt.block_ids],
        "remote_num_tokens": prompt.num_tokens,
        "tp_size": len(prompt.ranks),
        OURS: {
            "version": VERSION,
            "ranks": [[rank.port, rank.name] for rank in prompt.ranks],
            "first_blocks": list(prompt.first_blocks),
            "block_tokens": list(prompt.block_tokens),
            # The nonce is a text: a proxy that reads numbers as JavaScript does loses bits of a 63-bit integer.
            "lease": [prompt.lease.slot, f"{prompt.lease.nonce:x}"],
            "lease_seconds": prompt.lease_seconds,
            "prefix_tokens": prompt.prefix_tokens,
            "prefix": prompt.prefix,
        },
    }


def parse(params: Mapping[str, Any]) -> RemotePrompt:
    """Parses parameters that `compose` built. Ignores keys that a proxy added.

    Raises:
        ParamsError: a key is missing or wrong.
    """
    ours = params.get(OURS)
    if not isinstance(ours, Mapping):
        raise ParamsError(OURS, "missing: the producer runs another connector, or the proxy dropped it")
    if ours.get("version") != VERSION:
        raise ParamsError(f"{OURS}.version", f"{ours.get('version')!r}, but this engine uses {VERSION}")
    block_ids = _block_ids(params.get("remote_block_ids"))
    num_tokens = _number("remote_num_tokens", params.get("remote_num_tokens"), 0, 1 << 40)
    return RemotePrompt(
        engine_id=_name("remote_engine_id", params.get("remote_engine_id")),
        request_id=_name("remote_request_id", params.get("remote_request_id")),
        host=_name("remote_host", params.get("remote_host")),
        ranks=_ranks(ours.get("ranks")),
        num_tokens=num_tokens,
        block_ids=block_ids,
        first_blocks=_of_groups("first_blocks", ours, len(block_ids), 0),
        block_tokens=_of_groups("block_tokens", ours, len(block_ids), 1),
        lease=_lease(ours.get("lease")),
        lease_seconds=_seconds(ours.get("lease_seconds")),
        prefix_tokens=_number(f"{OURS}.prefix_tokens", ours.get("prefix_tokens"), 0, num_tokens),
        prefix=_name(f"{OURS}.prefix", ours.get("prefix")),
    )


def _ranks(found: Any) -> tuple[RankAddress, ...]:
    key = f"{OURS}.ranks"
    if not _is_list(found) or not 0 < len(found) <= MAX_RANKS:
        raise ParamsError(key, f"not a list of pairs of port and name, for at most {MAX_RANKS} ranks")
    for each in found:
        if not _is_list(each) or len(each) != 2:
            raise ParamsError(key, "an entry is not a pair of port and name")
    return tuple(RankAddress(_number(key, port, 1, (1 << 16) - 1), _name(key, name)) for port, name in found)


def _block_ids(found: Any) -> tuple[tuple[int, ...], ...]:
    if not _is_list(found) or not 0 < len(found) <= MAX_GROUPS:
        raise ParamsError("remote_block_ids", f"not a list of one list for each of 1 to {MAX_GROUPS} groups")
    return tuple(_numbers(f"remote_block_ids[{i}]", ids, 0, 1 << 40, MAX_BLOCKS) for i, ids in enumerate(found))


def _of_groups(name: str, ours: Mapping[str, Any], num_groups: int, low: int) -> tuple[int, ...]:
    found = _numbers(f"{OURS}.{name}", ours.get(name), low, 1 << 40, MAX_GROUPS)
    if len(found) != num_groups:
        raise ParamsError(f"{OURS}.{name}", f"{len(found)} numbers for {num_groups} groups")
    return found


def _lease(found: Any) -> Lease:
    if not _is_list(found) or len(found) != 2 or not isinstance(found[1], str) or len(found[1]) > 16:
        raise ParamsError(f"{OURS}.lease", "not a pair of slot and nonce")
    try:
        nonce = int(found[1], 16)
    except ValueError:
        raise ParamsError(f"{OURS}.lease", "the nonce is not a hexadecimal number") from None
    if not NO_NONCE < nonce <= MAX_NONCE:
        raise ParamsError(f"{OURS}.lease", "the nonce is out of range")
    return Lease(_number(f"{OURS}.lease", found[0], 0, 1 << 32), nonce)


def _numbers(key: str, found: Any, low: int, high: int, most: int) -> tuple[int, ...]:
    if not _is_list(found) or len(found) > most:
        raise ParamsError(key, f"not a list of at most {most} numbers")
    return tuple(_number(key, each, low, high) for each in found)


def _number(key: str, found: Any, low: int, high: int) -> int:
    if type(found) is not int or not low <= found <= high:
        raise ParamsError(key, f"{str(found)[:40]!r} is not an integer from {low} to {high}")
    return found


def _seconds(found: Any) -> float:
    if type(found) not in (int, float) or not 0 < found < 1e9:
        raise ParamsError(f"{OURS}.lease_seconds", f"{str(found)[:40]!r} is not a number of seconds")
    return float(found)


def _name(key: str, found: Any) -> str:
    # A name appears in logs, so it must be printable.
    if not isinstance(found, str) or not 0 < len(found) <= MAX_NAME or not found.isprintable():
        raise ParamsError(key, "missing" if found is None else f"{str(found)[:40]!r} is not a name")
    return found


def _is_list(found: Any) -> bool:
    return isinstance(found, Sequence) and not isinstance(found, str | bytes)
