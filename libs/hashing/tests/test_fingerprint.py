from collections import Counter
from random import Random

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.hashing import Fingerprint, GroupFingerprint, LayerFingerprint, diff, group_digest

LAYER = LayerFingerprint(name="model.layers.0.attn", page_bytes=65536, facts={"dtype": "torch.bfloat16"})
GROUP = GroupFingerprint(kind="full", block_tokens=128, layers=(LAYER,))
OTHER_LAYER = LayerFingerprint(name="model.layers.1.attn", page_bytes=65536, facts={"dtype": "torch.bfloat16"})
OTHER_GROUP = msgspec.structs.replace(GROUP, block_tokens=64)
CACHE = Fingerprint(
    facts={"weights": "sampled 1c", "cache_config": "CacheConfig", "cache_config.cache_dtype": '"auto"'},
    chunk_tokens=128,
    hash_algorithm="sha256",
    tensor_parallel_size=1,
    groups=(GROUP,),
)


def test_the_digest_is_the_same_in_every_process_and_release() -> None:
    assert CACHE.digest().hex() == "9f164f21197a9f43fa9ed526777c128e7bc1f94212341f1844a5893b435b65cc"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("facts", CACHE.facts | {"weights": "full 1c"}, "weights: sampled 1c is not full 1c"),
        ("facts", CACHE.facts | {"rope": "2"}, "rope: only the other's: 2"),
        (
            "facts",
            {"weights": "sampled 1c", "cache_config": "CacheConfig"},
            'cache_config.cache_dtype: only mine: "auto"',
        ),
        ("facts", {"weights": "sampled 1c", "cache_config": "null"}, "cache_config: CacheConfig is not null"),
        ("facts", CACHE.facts | {"weights": "a\nb"}, "weights: sampled 1c is not 'a\\nb'"),
        ("facts", CACHE.facts | {"weights": ""}, "weights: sampled 1c is not ''"),
        ("chunk_tokens", 256, "chunk_tokens (tokens in a chunk): 128 is not 256"),
        ("hash_algorithm", "xxhash", "hash_algorithm (the block hash algorithm): 'sha256' is not 'xxhash'"),
        ("tensor_parallel_size", 2, "tensor_parallel_size (the number of tensor-parallel ranks): 1 is not 2"),
        ("tensor_parallel_rank", 1, "tensor_parallel_rank (the tensor-parallel rank): None is not 1"),
        ("format_version", 99, "format_version (the version of keys and chunks): 6 is not 99"),
        ("groups", (OTHER_GROUP,), "groups[0].block_tokens (tokens in a block): 128 is not 64"),
        (
            "groups",
            (GROUP, GROUP),
            "groups (the stored groups): only the other's: full in blocks of 128, layers model.layers.0.attn",
        ),
        ("groups", (), "groups (the stored groups): only mine: full in blocks of 128, layers model.layers.0.attn"),
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
            (msgspec.structs.replace(LAYER, facts={"dtype": "int8", "head_size": "64"}), OTHER_LAYER),
            (
                "groups[0].layers[model.layers.0.attn].dtype: torch.bfloat16 is not int8",
                "groups[0].layers[model.layers.0.attn].head_size: only the other's: 64",
            ),
        ),
        (
            (LAYER, msgspec.structs.replace(OTHER_LAYER, name="model.layers.2.attn")),
            (
                "groups[0].layers (the group's layers): only mine: model.layers.1.attn",
                "groups[0].layers (the group's layers): only the other's: model.layers.2.attn",
            ),
        ),
        ((OTHER_LAYER, LAYER), ("groups[0].layers (the group's layers): the same layers in another order",)),
        (
            (LAYER, OTHER_LAYER, OTHER_LAYER),
            ("groups[0].layers (the group's layers): a layer that is listed more than once",),
        ),
    ],
)
def test_a_layer_that_differs_is_reported_by_its_name(layers: tuple[LayerFingerprint, ...], words: tuple[str]) -> None:
    mine = msgspec.structs.replace(CACHE, groups=(msgspec.structs.replace(GROUP, layers=(LAYER, OTHER_LAYER)),))
    other = msgspec.structs.replace(CACHE, groups=(msgspec.structs.replace(GROUP, layers=layers),))
    assert diff(mine, other) == words


FACTS = st.dictionaries(st.sampled_from(["a", "a.b", "a.b.c", "a[0]", "b"]), st.sampled_from("12"), max_size=3)
LAYERS = st.builds(LayerFingerprint, name=st.sampled_from("abc"), page_bytes=st.integers(1, 2), facts=FACTS)
GROUPS = st.builds(
    GroupFingerprint,
    kind=st.sampled_from(["full", "window"]),
    block_tokens=st.sampled_from([16, 32]),
    layers=st.lists(LAYERS, max_size=3).map(tuple),
    lookahead_tokens=st.integers(0, 1),
)
CACHES = st.builds(
    lambda rank, facts, groups: msgspec.structs.replace(
        CACHE, tensor_parallel_rank=rank, facts=facts, groups=tuple(groups)
    ),
    st.sampled_from([None, 3]),
    FACTS,
    st.lists(GROUPS, max_size=4),
)


@st.composite
def neighbours(draw: st.DrawFn) -> tuple[Fingerprint, Fingerprint]:
    """Two caches with similar groups in any order."""
    first = draw(CACHES)
    groups = draw(st.permutations(first.groups))
    changed = draw(st.integers(0, len(groups)))
    groups = [*groups[:changed], *draw(st.lists(GROUPS, max_size=1)), *groups[changed + draw(st.integers(0, 1)) :]]
    return first, msgspec.structs.replace(first, groups=tuple(groups))


def repr_of(group: GroupFingerprint) -> str:
    """Groups hold facts, so they are not hashable; equal ones have equal representations."""
    return repr(msgspec.to_builtins(group, order="sorted"))


@given(neighbours() | st.tuples(CACHES, CACHES))
def test_the_diff_is_empty_exactly_when_the_digests_are_equal(both: tuple[Fingerprint, Fingerprint]) -> None:
    a, b = both
    same = a.tensor_parallel_rank == b.tensor_parallel_rank and a.facts == b.facts
    same = same and Counter(map(repr_of, a.groups)) == Counter(map(repr_of, b.groups))
    assert (a.digest() == b.digest()) == (a.encode() == b.encode()) == (not diff(a, b)) == (not diff(b, a)) == same


@given(CACHES, st.randoms())
def test_the_order_of_groups_does_not_change_the_digest(cache: Fingerprint, random: Random) -> None:
    groups = list(cache.groups)
    random.shuffle(groups)
    assert msgspec.structs.replace(cache, groups=tuple(groups)).digest() == cache.digest()


def test_groups_are_matched_by_their_layers_and_reported_by_their_own_index() -> None:
    layers = [msgspec.structs.replace(LAYER, name=name) for name in "abcd"]
    mine = (
        msgspec.structs.replace(GROUP, layers=(layers[0],)),
        msgspec.structs.replace(GROUP, layers=(layers[1], layers[2])),
        msgspec.structs.replace(GROUP, layers=(layers[3],)),
    )
    other = (
        mine[2],
        msgspec.structs.replace(mine[1], block_tokens=64, layers=(layers[1], layers[3])),
        msgspec.structs.replace(mine[0], kind="window", window_tokens=512),
    )
    words = diff(msgspec.structs.replace(CACHE, groups=mine), msgspec.structs.replace(CACHE, groups=other))
    assert words == (
        "groups[0].kind (what the group needs to resume): 'full' is not 'window'",
        "groups[0].window_tokens (tokens in the window): None is not 512",
        "groups[1].block_tokens (tokens in a block): 128 is not 64",
        "groups[1].layers (the group's layers): only mine: c",
        "groups[1].layers (the group's layers): only the other's: d",
    )


def test_groups_without_common_layers_are_compared_in_order() -> None:
    renamed = msgspec.structs.replace(GROUP, layers=(OTHER_LAYER,))
    assert diff(CACHE, msgspec.structs.replace(CACHE, groups=(renamed,))) == (
        "groups[0].layers (the group's layers): only mine: model.layers.0.attn",
        "groups[0].layers (the group's layers): only the other's: model.layers.1.attn",
    )


def test_the_digest_of_a_group_is_the_same_in_every_process_and_release() -> None:
    assert group_digest(GROUP).hex() == "7ea00893dde98b745278cc16c16d799a08169103ef9767d03a7fb03982670ab0"


def test_the_digest_of_a_group_is_no_plain_digest_of_its_bytes() -> None:
    assert group_digest(GROUP) != blake3(msgspec.msgpack.encode(GROUP, order="sorted")).digest()


def test_a_fingerprint_survives_encoding() -> None:
    cache = msgspec.structs.replace(CACHE, tensor_parallel_rank=1)
    assert Fingerprint.decode(cache.encode()) == cache


@given(CACHES)
def test_any_decoded_fingerprint_equals_the_original(cache: Fingerprint) -> None:
    found = Fingerprint.decode(cache.encode())
    assert found.encode() == cache.encode() and diff(found, cache) == ()


def test_an_encoding_with_its_groups_in_another_order_is_refused() -> None:
    cache = msgspec.structs.replace(CACHE, groups=(GROUP, OTHER_GROUP))
    both = {
        msgspec.msgpack.encode(msgspec.structs.replace(cache, groups=g), order="sorted")
        for g in ((GROUP, OTHER_GROUP), (OTHER_GROUP, GROUP))
    }
    [wrong] = both - {cache.encode()}
    with pytest.raises(ValueError, match="or groups are"):
        Fingerprint.decode(wrong)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        CACHE.encode()[:-1],
        CACHE.encode() + b"x",
        msgspec.msgpack.encode(CACHE),
        msgspec.msgpack.encode(msgspec.to_builtins(CACHE) | {"zeal": 1}, order="sorted"),
        b"\x81\xa4zeal" + b"\x91" * 100_000,
    ],
)
def test_a_non_canonical_encoding_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not the encoding of a fingerprint"):
        Fingerprint.decode(data)


def test_equal_fingerprints_have_an_empty_diff() -> None:
    assert diff(CACHE, msgspec.structs.replace(CACHE)) == ()


def test_ranks_of_one_cache_have_different_fingerprints() -> None:
    first, second = (msgspec.structs.replace(CACHE, tensor_parallel_rank=rank) for rank in (0, 1))
    assert first.digest() != second.digest() != CACHE.digest()
