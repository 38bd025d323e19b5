"""Differences of two fingerprints, in words for operators."""

from collections.abc import Mapping, Sequence

import msgspec

from hybridkv.hashing.fingerprint import Fingerprint, GroupFingerprint, LayerFingerprint, group_digest

_MEANINGS = {
    "chunk_tokens": "tokens in a chunk",
    "hash_algorithm": "the block hash algorithm",
    "tensor_parallel_size": "the number of tensor-parallel ranks",
    "tensor_parallel_rank": "the tensor-parallel rank",
    "format_version": "the version of keys and chunks",
    "groups": "the stored groups",
    "kind": "what the group needs to resume",
    "block_tokens": "tokens in a block",
    "window_tokens": "tokens in the window",
    "align_tokens": "tokens between attention-chunk boundaries",
    "lookahead_tokens": "tokens read past a chunk's end",
    "layers": "the group's layers",
    "name": "the layer's name",
    "page_bytes": "bytes in a page",
}


def diff(mine: Fingerprint, other: Fingerprint) -> tuple[str, ...]:
    """List the fields in which two fingerprints differ, in words. Empty exactly if the digests are equal.

    For example `groups[1].block_tokens (tokens in a block): 16 is not 32`. Groups are matched by common layers, the
    rest in order, and named by their index in `mine`; layers are matched by name. Entries of only one side are listed
    as such, except a fact below another differing fact.
    """
    return tuple(_diff_fields("", mine, other))


def _diff_fields(path: str, mine: msgspec.Struct, other: msgspec.Struct) -> list[str]:
    found: list[str] = []
    for field in mine.__struct_fields__:
        a, b = getattr(mine, field), getattr(other, field)
        at = f"{path}.{field}" if path else field
        if field == "facts":
            found += _diff_facts(path, a, b)
        elif field == "groups":
            found += _diff_groups(at, a, b)
        elif field == "layers":
            found += _diff_layers(at, a, b)
        elif a != b:
            found.append(f"{at} ({_MEANINGS[field]}): {a!r} is not {b!r}")
    return found


def _diff_facts(path: str, mine: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Compare facts by name. A fact of only one side is not listed if a fact that contains it differs too. Fact `a`
    contains `a.b` and `a[0]`."""
    differing = {name for name in mine.keys() | other.keys() if mine.get(name) != other.get(name)}
    found = []
    for name in sorted(differing):
        if name in mine and name in other:
            found.append(f"{_path_of(path, name)}: {_format_value(mine[name])} is not {_format_value(other[name])}")
        elif not any(part in differing for part in _parents(name)):
            side, value = ("mine", mine[name]) if name in mine else ("the other's", other[name])
            found.append(f"{_path_of(path, name)}: only {side}: {_format_value(value)}")
    return found


def _path_of(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _parents(name: str) -> list[str]:
    return [name[:i] for i, letter in enumerate(name) if letter in ".["]


def _format_value(value: str) -> str:
    return value if value and value.isprintable() else repr(value)


def _diff_groups(path: str, mine: Sequence[GroupFingerprint], other: Sequence[GroupFingerprint]) -> list[str]:
    ours, theirs = _without_equal_groups(mine, other)
    pairs = _match_groups(ours, theirs)
    found = []
    for i, j in sorted(pairs.items()):
        found += _diff_fields(f"{path}[{i}]", ours[i], theirs[j])
    taken = set(pairs.values())
    for side, alone in (
        ("mine", [group for i, group in ours.items() if i not in pairs]),
        ("the other's", [group for j, group in theirs.items() if j not in taken]),
    ):
        found += [f"{path} ({_MEANINGS['groups']}): only {side}: {_describe_group(group)}" for group in alone]
    return found


def _describe_group(group: GroupFingerprint) -> str:
    names = ", ".join(layer.name for layer in group.layers) or "none"
    return f"{group.kind!s} in blocks of {group.block_tokens}, layers {names}"


_Groups = dict[int, GroupFingerprint]
"""Groups of one fingerprint by index."""


def _without_equal_groups(
    mine: Sequence[GroupFingerprint], other: Sequence[GroupFingerprint]
) -> tuple[_Groups, _Groups]:
    """Groups of each side without an equal group on the other side. Each group cancels one equal group."""
    ours, theirs = dict(enumerate(mine)), dict(enumerate(other))
    digests = {j: group_digest(group) for j, group in theirs.items()}
    for i, group in enumerate(mine):
        digest = group_digest(group)
        same = next((j for j in theirs if digests[j] == digest), None)
        if same is not None:
            del ours[i], theirs[same]
    return ours, theirs


def _match_groups(ours: _Groups, theirs: _Groups) -> dict[int, int]:
    """Pairs of groups to compare: first those with the most common layers, then the rest in order."""
    names = [{i: {layer.name for layer in group.layers} for i, group in side.items()} for side in (ours, theirs)]
    by_similarity = sorted((-len(names[0][i] & names[1][j]), i, j) for i in ours for j in theirs)
    pairs: dict[int, int] = {}
    for _, i, j in by_similarity:
        if i not in pairs and j not in pairs.values():
            pairs[i] = j
    return pairs


def _diff_layers(path: str, mine: Sequence[LayerFingerprint], other: Sequence[LayerFingerprint]) -> list[str]:
    ours, theirs = {layer.name: layer for layer in mine}, {layer.name: layer for layer in other}
    at = f"{path} ({_MEANINGS['layers']})"
    found = []
    for name in sorted(ours.keys() & theirs.keys()):
        found += _diff_fields(f"{path}[{name}]", ours[name], theirs[name])
    for side, here, there in (("mine", ours, theirs), ("the other's", theirs, ours)):
        if alone := sorted(here.keys() - there.keys()):
            found.append(f"{at}: only {side}: {', '.join(alone)}")
    shared = [[layer.name for layer in side if layer.name in ours.keys() & theirs.keys()] for side in (mine, other)]
    if sorted(shared[0]) != sorted(shared[1]):
        found.append(f"{at}: a layer that is listed more than once")
    elif shared[0] != shared[1]:
        found.append(f"{at}: the same layers in another order")
    if not found and tuple(mine) != tuple(other):
        found.append(f"{at}: a layer that is listed more than once, with different pages")
    return found
