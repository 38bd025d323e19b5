"""In what two fingerprints differ, in words that an operator can act on."""

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
    """Every field in which two fingerprints differ, in words.

    For example `groups[1].block_tokens (tokens in a block): 16 is not 32`. Groups are matched by their layers, whatever
    their order, and called by their index in `mine`; layers go by their names. What only one of the two has is listed
    as such. Nothing is said exactly when the digests are equal.
    """
    return tuple(_fields("", mine, other))


def _fields(path: str, mine: msgspec.Struct, other: msgspec.Struct) -> list[str]:
    found: list[str] = []
    for field in mine.__struct_fields__:
        a, b = getattr(mine, field), getattr(other, field)
        at = f"{path}.{field}" if path else field
        if field == "facts":
            found += _facts(path, a, b)
        elif field == "groups":
            found += _by_layers(at, a, b)
        elif field == "layers":
            found += _by_name(at, a, b)
        elif a != b:
            found.append(f"{at} ({_MEANINGS[field]}): {a!r} is not {b!r}")
    return found


def _facts(path: str, mine: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """By name. What only one side has is not listed where something that it is a part of differs as well."""
    differing = {name for name in mine.keys() | other.keys() if mine.get(name) != other.get(name)}
    found = []
    for name in sorted(differing):
        if name in mine and name in other:
            found.append(f"{_at(path, name)}: {_shown(mine[name])} is not {_shown(other[name])}")
        elif not any(part in differing for part in _parents(name)):
            side, value = ("mine", mine[name]) if name in mine else ("the other's", other[name])
            found.append(f"{_at(path, name)}: only {side}: {_shown(value)}")
    return found


def _at(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _parents(name: str) -> list[str]:
    return [name[:i] for i, letter in enumerate(name) if letter in ".["]


def _shown(value: str) -> str:
    return value if value and value.isprintable() else repr(value)


def _by_layers(path: str, mine: Sequence[GroupFingerprint], other: Sequence[GroupFingerprint]) -> list[str]:
    ours, theirs = _without_equals(mine, other)
    pairs = _matched(ours, theirs)
    found = []
    for i, j in sorted(pairs.items()):
        found += _fields(f"{path}[{i}]", ours[i], theirs[j])
    taken = set(pairs.values())
    for side, alone in (
        ("mine", [group for i, group in ours.items() if i not in pairs]),
        ("the other's", [group for j, group in theirs.items() if j not in taken]),
    ):
        found += [f"{path} ({_MEANINGS['groups']}): only {side}: {_called(group)}" for group in alone]
    return found


def _called(group: GroupFingerprint) -> str:
    names = ", ".join(layer.name for layer in group.layers) or "none"
    return f"{group.kind!s} in blocks of {group.block_tokens}, layers {names}"


_Groups = dict[int, GroupFingerprint]
"""Groups of one fingerprint by their index there."""


def _without_equals(mine: Sequence[GroupFingerprint], other: Sequence[GroupFingerprint]) -> tuple[_Groups, _Groups]:
    """The groups of each that the other has not, as often as it has them."""
    ours, theirs = dict(enumerate(mine)), dict(enumerate(other))
    digests = {j: group_digest(group) for j, group in theirs.items()}
    for i, group in enumerate(mine):
        digest = group_digest(group)
        same = next((j for j in theirs if digests[j] == digest), None)
        if same is not None:
            del ours[i], theirs[same]
    return ours, theirs


def _matched(ours: _Groups, theirs: _Groups) -> dict[int, int]:
    """Pairs of groups to compare: those with the most layers in common first, at last whatever is left, in order."""
    names = [{i: {layer.name for layer in group.layers} for i, group in side.items()} for side in (ours, theirs)]
    by_likeness = sorted((-len(names[0][i] & names[1][j]), i, j) for i in ours for j in theirs)
    pairs: dict[int, int] = {}
    for _, i, j in by_likeness:
        if i not in pairs and j not in pairs.values():
            pairs[i] = j
    return pairs


def _by_name(path: str, mine: Sequence[LayerFingerprint], other: Sequence[LayerFingerprint]) -> list[str]:
    ours, theirs = {layer.name: layer for layer in mine}, {layer.name: layer for layer in other}
    at = f"{path} ({_MEANINGS['layers']})"
    found = []
    for name in sorted(ours.keys() & theirs.keys()):
        found += _fields(f"{path}[{name}]", ours[name], theirs[name])
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
