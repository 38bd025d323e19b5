import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.hashing import Fingerprint, GroupFingerprint, LayerFingerprint, diff

LAYER = LayerFingerprint(name="model.layers.0.attn", dtype="torch.bfloat16", page_bytes=65536)
GROUP = GroupFingerprint(kind="full", block_tokens=128, layers=(LAYER,))
OTHER_LAYER = LayerFingerprint(name="model.layers.1.attn", dtype="torch.bfloat16", page_bytes=65536)
OTHER_GROUP = msgspec.structs.replace(GROUP, block_tokens=64)
CACHE = Fingerprint(
    model="org/model",
    revision="abc123",
    weights="",
    dtype="torch.bfloat16",
    cache_dtype="auto",
    kv_layout="LBHNC",
    state_layout="",
    chunk_tokens=128,
    hash_algorithm="sha256",
    tensor_parallel_size=1,
    groups=(GROUP,),
)


def test_the_digest_is_the_same_in_every_process_and_release() -> None:
    assert CACHE.digest().hex() == "93c057d7f29eeb680802e0d2f14f96ffdcb49e1538efcfb075f9d16ac5aaa080"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("model", "org/other", "model (the model): 'org/model' is not 'org/other'"),
        ("revision", "def456", "revision (the model's revision): 'abc123' is not 'def456'"),
        ("weights", "77", "weights (the weights' digest): '' is not '77'"),
        ("dtype", "torch.float16", "dtype (the element type): 'torch.bfloat16' is not 'torch.float16'"),
        ("cache_dtype", "fp8", "cache_dtype (the KV cache's element type): 'auto' is not 'fp8'"),
        ("kv_layout", "BLHNC", "kv_layout (the layout of attention pages): 'LBHNC' is not 'BLHNC'"),
        ("state_layout", "DS", "state_layout (the layout of recurrent states): '' is not 'DS'"),
        ("chunk_tokens", 256, "chunk_tokens (tokens in a chunk): 128 is not 256"),
        ("hash_algorithm", "xxhash", "hash_algorithm (the block hash algorithm): 'sha256' is not 'xxhash'"),
        ("tensor_parallel_size", 2, "tensor_parallel_size (the number of tensor-parallel ranks): 1 is not 2"),
        ("tensor_parallel_rank", 1, "tensor_parallel_rank (the tensor-parallel rank): None is not 1"),
        ("format_version", 99, "format_version (the version of keys and chunks): 3 is not 99"),
        ("groups", (OTHER_GROUP,), "groups[0].block_tokens (tokens in a block): 128 is not 64"),
        ("groups", (GROUP, GROUP), "groups (the stored groups): 1 groups are not 2"),
    ],
)
def test_every_field_changes_the_digest_and_is_named_by_diff(field: str, value: object, words: str) -> None:
    other = msgspec.structs.replace(CACHE, **{field: value})
    assert other.digest() != CACHE.digest()
    assert diff(CACHE, other) == CACHE.diff(other) == (words,)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (
            (msgspec.structs.replace(LAYER, page_bytes=32768), OTHER_LAYER),
            ("groups[0].layers[model.layers.0.attn].page_bytes (bytes in a page): 65536 is not 32768",),
        ),
        (
            (LAYER, msgspec.structs.replace(OTHER_LAYER, name="model.layers.2.attn")),
            (
                "groups[0].layers (the group's layers): only mine: model.layers.1.attn",
                "groups[0].layers (the group's layers): only the other's: model.layers.2.attn",
            ),
        ),
        ((OTHER_LAYER, LAYER), ("groups[0].layers (the group's layers): the same layers in another order",)),
    ],
)
def test_a_layer_that_differs_is_called_by_its_name(layers: tuple[LayerFingerprint, ...], words: tuple[str]) -> None:
    mine = msgspec.structs.replace(CACHE, groups=(msgspec.structs.replace(GROUP, layers=(LAYER, OTHER_LAYER)),))
    other = msgspec.structs.replace(CACHE, groups=(msgspec.structs.replace(GROUP, layers=layers),))
    assert diff(mine, other) == words


@given(st.sampled_from([CACHE, CACHE.for_rank(3)]), st.sampled_from([CACHE, CACHE.for_rank(3)]))
def test_fingerprints_differ_in_words_exactly_when_their_digests_differ(a: Fingerprint, b: Fingerprint) -> None:
    assert bool(diff(a, b)) == (a.digest() != b.digest())


def test_a_fingerprint_is_read_back_from_its_encoding() -> None:
    cache = CACHE.for_rank(1)
    assert Fingerprint.decode(cache.encode()) == cache


@pytest.mark.parametrize(
    "data",
    [
        b"",
        CACHE.encode()[:-1],
        CACHE.encode() + b"x",
        msgspec.msgpack.encode(CACHE),
        msgspec.msgpack.encode(msgspec.to_builtins(CACHE) | {"zeal": 1}, order="sorted"),
    ],
)
def test_what_is_not_the_canonical_encoding_of_a_fingerprint_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not the encoding of a fingerprint"):
        Fingerprint.decode(data)


def test_equal_fingerprints_differ_in_nothing() -> None:
    assert diff(CACHE, msgspec.structs.replace(CACHE)) == ()


def test_ranks_of_one_cache_have_fingerprints_of_their_own() -> None:
    assert CACHE.for_rank(0).digest() != CACHE.for_rank(1).digest() != CACHE.digest()
