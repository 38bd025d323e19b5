"""What hashing names, canonical stores: the two know nothing of each other, and a chunk holds any real key.

Nor do canonical and the tiers; what each writes begins with bytes of its own.
"""

import hashlib
import importlib
import pkgutil

import msgspec
import pytest

from hybridkv import canonical
from hybridkv.canonical import ChunkIdentity, WrongChunkError, decode, dump, encode, undump
from hybridkv.hashing import ChunkKeys, Fingerprint, GroupFingerprint, LayerFingerprint, group_digest
from hybridkv.tiers import disk

LAYER = LayerFingerprint(name="layers.0.attn", page_bytes=4096, facts={"dtype": "bfloat16"})
FULL = GroupFingerprint(kind="full", block_tokens=64, layers=(LAYER,))
STATE = GroupFingerprint(kind="recurrent", block_tokens=128, layers=(LAYER,))
CACHE = Fingerprint(
    facts={"model": "org/model", "cache_config.cache_dtype": "auto"},
    chunk_tokens=128,
    hash_algorithm="sha256",
    tensor_parallel_size=1,
    groups=(FULL, STATE),
)
KEYS = ChunkKeys(CACHE, 128)
PROMPT = list(range(256))
SECTIONS = [b"pages" * 16, b"state".ljust(16, b"\0")]


def magics() -> set[tuple[str, bytes]]:
    """What files begin with, by the name in the code, whichever module defines it or only uses it."""
    found: set[tuple[str, bytes]] = set()
    for library in (canonical, disk):
        for module in pkgutil.walk_packages(library.__path__, f"{library.__name__}."):
            # What is not installed everywhere says nothing of files.
            if not module.name.endswith((".torch_view", ".native_records")):
                values = vars(importlib.import_module(module.name))
                found |= {(name, value) for name, value in values.items() if name.endswith("MAGIC")}
    return found


def test_no_two_kinds_of_files_begin_with_the_same_bytes() -> None:
    found = magics()
    assert len(found) >= 8, "every file of the disk tier has one, and a chunk"
    assert len({value for _, value in found}) == len(found), found


PREFIXES = {
    "the engine's sha256": [hashlib.sha256(bytes([i])).digest() for i in range(2)],
    "an engine's 16 byte hash": [hashlib.md5(bytes([i])).digest() for i in range(2)],
    "our own chain": KEYS.token_hashes().upto(PROMPT),
}


def identity(group: int, key: bytes) -> ChunkIdentity:
    return ChunkIdentity(
        fingerprint=CACHE.digest(), group=group_digest(CACHE.groups[group]), key=key, start_token=128, end_token=256
    )


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("group", [0, 1])
def test_a_chunk_is_stored_under_its_key_and_found_by_it_alone(group: int, prefix: str) -> None:
    hashes = PREFIXES[prefix]
    key = KEYS.key(group, hashes, 256)
    data = encode(identity(group, key), SECTIONS)
    assert undump(dump(data)) == data
    chunk = decode(data, fingerprint=CACHE.digest(), group=group_digest(CACHE.groups[group]), key=key)
    assert [bytes(section) for section in chunk.sections] == SECTIONS
    for other in (KEYS.key(1 - group, hashes, 256), KEYS.key(group, hashes, 128)):
        with pytest.raises(WrongChunkError, match="key"):
            decode(data, key=other)


def test_a_chunk_of_an_engine_that_numbers_its_groups_otherwise_is_the_one_asked_for() -> None:
    hashes = PREFIXES["our own chain"]
    data = encode(identity(1, KEYS.key(1, hashes, 256)), SECTIONS)
    there = ChunkKeys(msgspec.structs.replace(CACHE, groups=(STATE, FULL)), 128)
    chunk = decode(
        data,
        fingerprint=there.fingerprint.digest(),
        group=group_digest(there.fingerprint.groups[0]),
        key=there.key(0, there.token_hashes().upto(PROMPT), 256),
    )
    assert chunk.sections[1] == SECTIONS[1]
