import pytest

from hybridkv.planner import CacheSpec, GroupKind, GroupSpec, chunk_unit

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
    ],
)
def test_a_bad_size_is_refused_by_name(field: str, arguments: dict) -> None:
    with pytest.raises(ValueError, match=field):
        GroupSpec(**arguments)


def test_a_chunk_must_be_whole_blocks_of_every_stored_group() -> None:
    groups = (FULL, GroupSpec(kind=GroupKind.WINDOW, block_tokens=24, window_tokens=8))
    assert chunk_unit(groups) == 48
    assert CacheSpec(groups, 96).stored_groups == (0, 1)
    with pytest.raises(ValueError, match=r"chunk_tokens must be a multiple of 48 .* got 64"):
        CacheSpec(groups, 64)


def test_a_scratch_group_bounds_no_chunk() -> None:
    groups = (FULL, GroupSpec(kind=GroupKind.SCRATCH, block_tokens=7))
    assert CacheSpec(groups, 32).stored_groups == (0,)


@pytest.mark.parametrize("groups", [(), (GroupSpec(kind=GroupKind.SCRATCH, block_tokens=16),)])
def test_a_cache_without_stored_groups_is_refused(groups: tuple[GroupSpec, ...]) -> None:
    with pytest.raises(ValueError, match="groups"):
        CacheSpec(groups, 16)
