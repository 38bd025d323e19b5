import pytest

from hybridkv.planner import (
    CacheSpec,
    GroupKind,
    GroupSpec,
    LookupResult,
    Miss,
    chunk_unit,
    longest_hit,
    resume_start,
)

FULL = GroupSpec(kind=GroupKind.FULL, block_tokens=16)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("block_tokens", {"kind": GroupKind.FULL, "block_tokens": 0}),
        ("block_tokens", {"kind": GroupKind.FULL, "block_tokens": -16}),
        ("window_tokens", {"kind": GroupKind.WINDOW, "block_tokens": 16}),
        ("window_tokens", {"kind": GroupKind.WINDOW, "block_tokens": 16, "window_tokens": 0}),
        ("window_tokens", {"kind": GroupKind.FULL, "block_tokens": 16, "window_tokens": 128}),
        ("align_tokens", {"kind": GroupKind.CHUNKED, "block_tokens": 16}),
        ("align_tokens", {"kind": GroupKind.RECURRENT, "block_tokens": 16, "align_tokens": 16}),
        ("lookahead_tokens", {"kind": GroupKind.FULL, "block_tokens": 16, "lookahead_tokens": -1}),
        ("block_tokens", {"kind": GroupKind.FULL, "block_tokens": 16.5}),
        ("block_tokens", {"kind": GroupKind.FULL, "block_tokens": True}),
        ("block_tokens", {"kind": GroupKind.FULL, "block_tokens": "16"}),
        ("window_tokens", {"kind": GroupKind.WINDOW, "block_tokens": 16, "window_tokens": 16.0}),
        ("align_tokens", {"kind": GroupKind.CHUNKED, "block_tokens": 16, "align_tokens": True}),
        ("lookahead_tokens", {"kind": GroupKind.FULL, "block_tokens": 16, "lookahead_tokens": 0.5}),
        ("lookahead_tokens", {"kind": GroupKind.FULL, "block_tokens": 16, "lookahead_tokens": False}),
    ],
)
def test_a_bad_size_is_refused_by_name(field: str, arguments: dict) -> None:
    with pytest.raises(ValueError, match=field):
        GroupSpec(**arguments)


@pytest.mark.parametrize("kind", GroupKind)
def test_a_kind_may_be_given_by_its_value(kind: GroupKind) -> None:
    sizes = {"window_tokens": 33} if kind is GroupKind.WINDOW else {}
    sizes |= {"align_tokens": 64} if kind is GroupKind.CHUNKED else {}
    by_value = GroupSpec(kind.value, 16, **sizes)
    assert by_value.kind is kind
    assert by_value == GroupSpec(kind, 16, **sizes) and hash(by_value) == hash(GroupSpec(kind, 16, **sizes))


def test_a_kind_given_by_its_value_is_searched_like_the_kind() -> None:
    spec = CacheSpec((GroupSpec("recurrent", 16), GroupSpec("full", 16)), 16)
    assert isinstance(longest_hit(spec, 100, 0, lambda group, end: LookupResult.MISS), Miss)
    assert resume_start(spec.groups[1], 64) == 0


@pytest.mark.parametrize("kind", ["FULL", "sliding", "", None, 0, ["full"]])
def test_an_unknown_kind_is_refused_by_name(kind: object) -> None:
    with pytest.raises(ValueError, match=r"^kind must be one of full, window, chunked, recurrent, scratch, got"):
        GroupSpec(kind, 16)


@pytest.mark.parametrize(
    ("field", "chunk_tokens", "tail_tokens"),
    [("chunk_tokens", 32.0, None), ("chunk_tokens", True, None), ("tail_tokens", 32, 16.0), ("tail_tokens", 32, True)],
)
def test_a_chunk_or_tail_that_is_no_positive_integer_is_refused_by_name(
    field: str, chunk_tokens: int, tail_tokens: int | None
) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be a positive whole number"):
        CacheSpec((FULL,), chunk_tokens, tail_tokens)


def test_a_chunk_must_be_whole_blocks_of_every_stored_group() -> None:
    groups = (FULL, GroupSpec(kind=GroupKind.WINDOW, block_tokens=24, window_tokens=8))
    assert chunk_unit(groups) == 48
    assert CacheSpec(groups, 96).stored_groups == (0, 1)
    with pytest.raises(ValueError, match=r"chunk_tokens must be a multiple of 48 .* got 64"):
        CacheSpec(groups, 64)


def test_a_scratch_group_does_not_constrain_the_chunk() -> None:
    groups = (FULL, GroupSpec(kind=GroupKind.SCRATCH, block_tokens=7))
    assert CacheSpec(groups, 32).stored_groups == (0,)


@pytest.mark.parametrize("groups", [(), (GroupSpec(kind=GroupKind.SCRATCH, block_tokens=16),)])
def test_a_cache_without_stored_groups_is_refused(groups: tuple[GroupSpec, ...]) -> None:
    with pytest.raises(ValueError, match="groups"):
        CacheSpec(groups, 16)
