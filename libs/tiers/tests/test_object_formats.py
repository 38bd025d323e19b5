"""Formats of packs and manifests: encoded values decode to themselves, and changed bytes are rejected."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.tiers import Failure, FailureReason
from hybridkv.tiers.object.format.epoch import EPOCH_MARK_BYTES, decode_epoch, encode_epoch
from hybridkv.tiers.object.format.manifest import (
    MAX_PARTS,
    ManifestNode,
    ManifestPart,
    decode_manifest,
    encode_manifest,
)
from hybridkv.tiers.object.format.record import HEADER_BYTES, PartPlace, check_header, check_seal, encode_header
from hybridkv.tiers.object.format.seals import Seals
from hybridkv.tiers.object.names import (
    cache_name,
    epoch_name,
    is_manifest_point,
    manifest_name,
    namespace_of,
    pack_name,
    prefix_of,
    rank_name,
    tag_of,
)

GOLDEN = Path(__file__).parent / "golden"
PLACE = PartPlace("n/p/engine-1/3", 3, 4096)
KEY = bytes(range(48))
CHECKSUM = bytes(range(16))
CHUNK = memoryview(bytes(range(100)))
PATH = [
    ManifestNode(b"a" * 32, [ManifestPart(b"f" * 16, "n/p/e-1", 0, 4096), ManifestPart(b"w" * 16, "n/p/e-2", 0, 100)]),
    ManifestNode(b"b" * 32, []),
    ManifestNode(b"c" * 32, [ManifestPart(b"f" * 16, "n/p/e-1", 4256, 4096)]),
]

parts = st.builds(
    ManifestPart,
    st.binary(min_size=1, max_size=16),
    st.text(min_size=1, max_size=8),
    st.integers(0, 1 << 40),
    st.integers(1, 1 << 40),
)
paths = st.lists(st.builds(ManifestNode, st.binary(max_size=32), st.lists(parts, max_size=3)), max_size=6)


def header(seals: Seals) -> bytes:
    return encode_header(seals, PLACE, KEY, CHECKSUM, len(CHUNK), [CHUNK[:30], CHUNK[30:]])


@pytest.mark.parametrize("secret", [b"", b"one"])
def test_a_header_decodes_to_its_checksum(secret: bytes) -> None:
    seals = Seals(secret)
    made = header(seals)
    assert len(made) == HEADER_BYTES
    assert check_header(made, PLACE, KEY, len(CHUNK)) == CHECKSUM
    assert check_seal(seals, made, PLACE, [CHUNK[:30], CHUNK[30:]]) is None


@pytest.mark.parametrize("secret", [b"", b"one"])
def test_a_seal_does_not_depend_on_the_cuts_between_buffers(secret: bytes) -> None:
    """The reader of a chunk has other buffers than its writer."""
    seals = Seals(secret)
    for views in ([CHUNK], [CHUNK[:1], CHUNK[1:99], CHUNK[99:]]):
        assert check_seal(seals, header(seals), PLACE, views) is None


@pytest.mark.parametrize("secret", [b"", b"one"])
def test_a_changed_byte_of_a_header_is_detected(secret: bytes) -> None:
    seals = Seals(secret)
    made = header(seals)
    for at in range(HEADER_BYTES):
        changed = bytearray(made)
        changed[at] ^= 1
        checked = check_header(bytes(changed), PLACE, KEY, len(CHUNK))
        found = isinstance(checked, Failure) or check_seal(seals, bytes(changed), PLACE, [CHUNK[:30], CHUNK[30:]])
        assert found, at


def test_a_header_is_valid_only_at_its_place() -> None:
    seals = Seals()
    made = header(seals)
    for place in (
        PLACE._replace(offset=0),
        PLACE._replace(object_name="n/p/engine-2/3"),
        PLACE._replace(object_name="m/p/engine-1/3"),
    ):
        assert check_seal(seals, made, place, [CHUNK]) is not None
    for place, key, num_bytes in (
        (PLACE._replace(rank=2), KEY, len(CHUNK)),
        (PLACE, KEY[::-1], len(CHUNK)),
        (PLACE, KEY[:-1], len(CHUNK)),
        (PLACE, KEY, len(CHUNK) - 1),
    ):
        checked = check_header(made, place, key, num_bytes)
        assert isinstance(checked, Failure)
        assert checked.reason is FailureReason.WRONG_KEY


def test_a_short_header_is_missing() -> None:
    checked = check_header(header(Seals())[:-1], PLACE, KEY, len(CHUNK))
    assert isinstance(checked, Failure)
    assert checked.reason is FailureReason.MISSING


def test_a_secret_seals_the_payload_too() -> None:
    other = memoryview(bytes(100))
    assert check_seal(Seals(b"one"), header(Seals(b"one")), PLACE, [other]) is not None
    assert check_seal(Seals(), header(Seals()), PLACE, [other]) is None, "the checksum covers the payload"


def test_a_seal_needs_the_secret() -> None:
    for secret in (b"", b"two"):
        assert check_seal(Seals(b"one"), header(Seals(secret)), PLACE, [CHUNK[:30], CHUNK[30:]]) is not None
        assert decode_manifest(Seals(b"one"), "m", 1, encode_manifest(Seals(secret), "m", 1, PATH)) is None


@settings(max_examples=examples(100, 8))
@given(paths, st.integers(1, 64), st.sampled_from([b"", b"one"]))
def test_a_manifest_decodes_to_its_path(path: list[ManifestNode], world_size: int, secret: bytes) -> None:
    data = encode_manifest(Seals(secret), "n/m/1", world_size, path)
    assert decode_manifest(Seals(secret), "n/m/1", world_size, data) == path


@given(st.data())
def test_a_changed_manifest_is_rejected(data: st.DataObject) -> None:
    made = bytearray(encode_manifest(Seals(), "m", 1, PATH))
    at = data.draw(st.integers(0, len(made) - 1))
    made[at] ^= data.draw(st.integers(1, 255))
    assert decode_manifest(Seals(), "m", 1, bytes(made)) is None
    assert decode_manifest(Seals(), "m", 1, bytes(made[:at])) is None


@given(st.binary(max_size=200))
def test_sealed_random_bytes_raise_nothing(body: bytes) -> None:
    data = Seals().of(b"m", body) + body
    decode_manifest(Seals(), "m", 1, data)
    check_header(body, PLACE, KEY, 100)


@pytest.mark.parametrize(
    "body",
    [
        [2, 1, [], [], [], [], []],
        [1, 2, [], [], [], [], []],
        [1, 1, [b"t"], ["p"], [b"x"], [1], [0, 0, 0]],
        [1, 1, [b"t"], ["p"], [b"x"], [1], [1, 0, 0, 5]],
        [1, 1, [b"t"], ["p"], [b"x"], [1], [0, -1, 0, 5]],
        [1, 1, [b"t"], ["p"], [b"x"], [1], [0, 0, -1, 5]],
        [1, 1, [b"t"], ["p"], [b"x"], [1], [0, 0, 0, 0]],
        [1, 1, [b"t"], ["p"], [b"x", b"y"], [2, -1], [0, 0, 0, 5]],
        [1, 1, [b"t"], ["p"], [b"x"], [], []],
        [1, 1, [b"t"], ["p"], [b"x"], [1], [0, 0, 1 << 63, 5]],
        [1, 1, [b"t" * 65], [], [], [], []],
        [1, 1, [b"t"] * 257, [], [], [], []],
        [1, 1, [], ["p" * 129], [], [], []],
        [1, 1, [], [], [b"x" * 65], [0], []],
        [1, 1, [], [], [], [], [], []],
    ],
)
def test_an_inconsistent_manifest_is_rejected(body: list[object]) -> None:
    import msgspec

    data = msgspec.msgpack.encode(body)
    assert decode_manifest(Seals(), "m", 1, Seals().of(b"m", data) + data) is None


LISTS = {
    "tags": lambda number: [1, 1, [b"t"] * number, [], [], [], []],
    "packs": lambda number: [1, 1, [], ["p1"] * number, [], [], []],
    "prefixes": lambda number: [1, 1, [], [], [b"x"] * number, [], []],
    "counts": lambda number: [1, 1, [], [], [], [0] * number, []],
    "numbers": lambda number: [1, 1, [], [], [], [], [300] * number],
}


@pytest.mark.parametrize("name", LISTS)
def test_a_crafted_manifest_costs_little_memory(name: str) -> None:
    """Its lengths are checked before any object is made from it."""
    import msgspec

    data = msgspec.msgpack.encode(LISTS[name](1_000_000))
    made = Seals().of(b"m", data) + data
    tracemalloc.start()
    assert decode_manifest(Seals(), "m", 1, made) is None
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 1 << 20


def test_a_manifest_of_the_largest_size_is_read() -> None:
    path = [
        ManifestNode(bytes([7]) * 32, [ManifestPart(b"f" * 16, "n/p/e-1", 4096 * number, 4096)])
        for number in range(MAX_PARTS)
    ]
    made = encode_manifest(Seals(), "m", 1, path)
    assert decode_manifest(Seals(), "m", 1, made) == path
    more = encode_manifest(Seals(), "m", 1, [*path, *path[:1]])
    assert decode_manifest(Seals(), "m", 1, more) is None


@pytest.mark.parametrize("secret", [b"", b"one"])
def test_an_epoch_mark_decodes_to_its_number(secret: bytes) -> None:
    made = encode_epoch(Seals(secret), "c/epoch", 7)
    assert len(made) == EPOCH_MARK_BYTES
    assert decode_epoch(Seals(secret), "c/epoch", made) == 7
    assert decode_epoch(Seals(secret), "d/epoch", made) is None
    assert decode_epoch(Seals(b"two"), "c/epoch", made) is None
    for at in range(len(made)):
        changed = bytearray(made)
        changed[at] ^= 1
        assert decode_epoch(Seals(secret), "c/epoch", bytes(changed)) is None
        assert decode_epoch(Seals(secret), "c/epoch", made[:at]) is None


def test_a_manifest_is_valid_only_under_its_name() -> None:
    data = encode_manifest(Seals(), "n/m/1", 1, PATH)
    assert decode_manifest(Seals(), "n/m/2", 1, data) is None
    assert decode_manifest(Seals(), "n/m/1", 2, data) is None


@pytest.mark.parametrize("secret", [b"", b"one"])
def test_the_bytes_equal_version_1(secret: bytes) -> None:
    """Changed bytes are another format, under another version."""
    made = {
        f"object_part_v1{'_keyed' if secret else ''}.bin": header(Seals(secret)),
        f"object_manifest_v1{'_keyed' if secret else ''}.bin": encode_manifest(Seals(secret), "n/m/1", 2, PATH),
        f"object_epoch_v1{'_keyed' if secret else ''}.bin": encode_epoch(Seals(secret), "c/epoch", 1_800_000_000),
    }
    for name, data in made.items():
        assert data == (GOLDEN / name).read_bytes(), name


def test_the_names_equal_version_2() -> None:
    cache = cache_name(b"one", bytes(32), 8)
    namespace = namespace_of(cache, 2)
    pack = pack_name("n", "e-1")
    assert [cache, namespace, manifest_name("n", b"prefix"), epoch_name("c"), rank_name(pack, 3)] == [
        "6696f07bd9cf017df2e4a85f4be7984b41efea4e",
        "0aa75139ce62e45ca624af8ddf030aae244c5fb3",
        "n/m/c54307b6e4b2ed72fb2eb426a14c51d4e3b1c27e",
        "c/epoch",
        "n/p/e-1/3",
    ]


def test_each_fact_of_a_cache_changes_its_name() -> None:
    names = {
        cache_name(b"", bytes(32), 8),
        cache_name(b"one", bytes(32), 8),
        cache_name(b"one", bytes(31) + b"1", 8),
        cache_name(b"one", bytes(32), 16),
    }
    assert len(names) == 4
    assert namespace_of("c", 1) != namespace_of("c", 2)


def test_a_key_is_a_tag_and_a_prefix_hash() -> None:
    assert (tag_of(KEY), prefix_of(KEY)) == (KEY[:16], KEY[16:])
    assert (tag_of(b"short"), prefix_of(b"short")) == (b"", b"short")


def test_one_in_eight_prefixes_is_a_manifest_point() -> None:
    import hashlib

    chosen = sum(is_manifest_point(hashlib.sha256(bytes([a, b])).digest(), 8) for a in range(64) for b in range(64))
    assert 400 < chosen < 630
