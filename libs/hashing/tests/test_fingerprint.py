import msgspec
import pytest

from hybridkv.hashing import Fingerprint, GroupFingerprint, LayerFingerprint, diff

LAYER = LayerFingerprint(name="model.layers.0.attn", dtype="torch.bfloat16", page_bytes=65536)
GROUP = GroupFingerprint(kind="full", block_tokens=128, layers=(LAYER,))
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
    assert CACHE.digest().hex() == "1d491816eec1e504c09999bfc076b594bee07f03787f202a117283a55e4ec364"


OTHER_GROUP = msgspec.structs.replace(GROUP, block_tokens=64)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("model", "org/other", "model: 'org/model' is not 'org/other'"),
        ("revision", "def456", "revision: 'abc123' is not 'def456'"),
        ("weights", "77", "weights: '' is not '77'"),
        ("dtype", "torch.float16", "dtype: 'torch.bfloat16' is not 'torch.float16'"),
        ("cache_dtype", "fp8", "cache_dtype: 'auto' is not 'fp8'"),
        ("kv_layout", "BLHNC", "kv_layout: 'LBHNC' is not 'BLHNC'"),
        ("state_layout", "DS", "state_layout: '' is not 'DS'"),
        ("chunk_tokens", 256, "chunk_tokens: 128 is not 256"),
        ("hash_algorithm", "xxhash", "hash_algorithm: 'sha256' is not 'xxhash'"),
        ("tensor_parallel_size", 2, "tensor_parallel_size: 1 is not 2"),
        ("tensor_parallel_rank", 1, "tensor_parallel_rank: None is not 1"),
        ("format_version", 99, "format_version: 1 is not 99"),
        ("groups", (OTHER_GROUP,), "groups[0].block_tokens: 128 is not 64"),
        ("groups", (GROUP, GROUP), "groups: 1 entries is not 2 entries"),
    ],
)
def test_every_field_changes_the_digest_and_is_named_by_diff(field: str, value: object, words: str) -> None:
    other = msgspec.structs.replace(CACHE, **{field: value})
    assert other.digest() != CACHE.digest()
    assert diff(CACHE, other) == (words,)


def test_equal_fingerprints_differ_in_nothing() -> None:
    assert diff(CACHE, msgspec.structs.replace(CACHE)) == ()


def test_ranks_of_one_cache_have_fingerprints_of_their_own() -> None:
    assert CACHE.for_rank(0).digest() != CACHE.for_rank(1).digest() != CACHE.digest()
