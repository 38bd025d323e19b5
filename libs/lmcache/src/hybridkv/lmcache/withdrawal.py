"""Deletes corrupt objects from a server, so that they can be stored again: a server never overwrites an object.

The server's ZMQ side has no call for this. The HTTP side deletes objects by hash, so this module computes the hash of a
chunk: BLAKE3 of the hash of the previous chunk and the words of the chunk.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec
from blake3 import blake3

from hybridkv.lmcache.connection import Connection, Ready
from hybridkv.lmcache.http import HttpAddress, HttpError, delete
from hybridkv.lmcache.operations import Prefix

logger = logging.getLogger(__name__)

_BEFORE_ALL = blake3(bytes(8) + bytes(4)).digest()
"""Previous hash of the first chunk: BLAKE3 of the number 0 in eight bytes and one token 0 in four bytes."""
_NO_DISK = 503
"""Status for tier "l2" of a server without that tier."""
TIMEOUT_S = 3.0
"""Timeout of one request, in seconds. The request blocks the connection's thread."""
MAX_ATTEMPTS, RETRY_S = 50, 0.2
"""Maximum attempts, and seconds between them. A server skips objects that are being read, so a deletion is retried."""


class _Deleted(msgspec.Struct):
    skipped: int
    ok: bool


def withdraw(connection: Connection, prefix: Prefix, rank: int, chunk: int, num_groups: int) -> None:
    """Deletes one rank's part of a chunk in the background. Reports no result. Deletes nothing if the server's hash
    algorithm is not BLAKE3.

    Args:
        connection: connection to the server.
        prefix: prefix with the chunk.
        rank: rank of the part.
        chunk: index of the chunk, from 0.
        num_groups: number of groups of the cache.
    """
    _begin(connection, _Withdrawal(prefix, rank, chunk, num_groups), 1)


@dataclass(frozen=True, slots=True)
class _Withdrawal:
    prefix: Prefix
    rank: int
    chunk: int
    num_groups: int

    def keys(self, chunk_tokens: int) -> list[dict[str, object]]:
        prefix, rank = self.prefix, self.rank
        name = object_names(prefix.words, chunk_tokens)[self.chunk]
        kv_rank = (prefix.world_size << 24) | (rank << 16) | (prefix.world_size << 8) | rank
        common = {"chunk_hash_hex": name.hex(), "model_name": prefix.model, "kv_rank": kv_rank, "cache_salt": ""}
        return [{**common, "object_group_id": group} for group in range(self.num_groups)]


def _begin(connection: Connection, withdrawal: _Withdrawal, attempt: int) -> None:
    def again() -> None:
        _begin(connection, withdrawal, attempt + 1)

    def task(ready: Ready) -> None:
        if ready.facts.hash_algorithm != "blake3":
            return  # the object stays until it is evicted
        keys = withdrawal.keys(ready.chunk_tokens)
        address = HttpAddress(connection.address.host, connection.address.http_port)
        try:
            has_skipped = _delete(address, keys, "l1")
            _delete(address, keys, "l2")
        except HttpError as error:
            logger.warning("could not delete corrupt objects from LMCache's server: %s", error)
            return
        if has_skipped and attempt < MAX_ATTEMPTS:
            connection.channel.after(RETRY_S, again)

    connection.post(task)


def _delete(address: HttpAddress, keys: list[dict[str, object]], tier: str) -> bool:
    """Deletes objects of one tier of a server. True if the server skipped objects. Raises `HttpError` on failure."""
    status, body = delete(address, "/cache/objects", {"keys": keys, "tier": tier, "force": False}, TIMEOUT_S)
    if status == _NO_DISK and tier == "l2":
        return False
    try:
        deleted = msgspec.json.decode(body, type=_Deleted)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise HttpError(f"DELETE /cache/objects: status {status}: {error}") from None
    if not deleted.ok:
        raise HttpError("DELETE /cache/objects: the server failed")
    return deleted.skipped > 0


def object_names(words: bytes, chunk_tokens: int) -> list[bytes]:
    """Hash of each chunk, computed in the same way as by a server."""
    names, name, chunk_bytes = [], _BEFORE_ALL, 4 * chunk_tokens
    for at in range(0, len(words), chunk_bytes):
        name = blake3(name + words[at : at + chunk_bytes]).digest()
        names.append(name)
    return names
