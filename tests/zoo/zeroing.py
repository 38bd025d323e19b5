"""Which stored bytes are the keys of a group, which its values or its states; and what a model says without them.

A comparison of answers proves something of a group only if the answers depend on what the group stores. So each part of
each group is zeroed in the store, with a renewed checksum, and the log-probabilities after it must change.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from audit import Audit, stored_views
from harness import Engine, Result


def parts(engine: Engine, group_index: int) -> tuple[str, ...]:
    """The parts that a group's pages have."""
    group = engine.kv_cache_config.kv_cache_groups[group_index]
    return tuple(_slices(_spec(group, group.layer_names[0]), _page_bytes(engine, group.layer_names[0])))


@contextlib.contextmanager
def zeroed(engine: Engine, audit: Audit, group_index: int, part: str) -> Iterator[None]:
    """A context in which this part of all stored pages of a group is zero. Checksums are recomputed."""
    group = engine.kv_cache_config.kv_cache_groups[group_index]
    kept: dict[bytes, bytes] = {}
    for key in audit.keys_of(group_index):
        pages = audit.stored[key][1]
        before = b"".join(bytes(view) for view in stored_views(engine, key))
        assert before == _joined(pages), "a chunk is not its pages, block by block, so the bytes to zero are unknown"
        kept[key] = before
        without = [
            [_without(page, _spec(group, name), part) for page in layer]
            for name, layer in zip(group.layer_names, pages, strict=True)
        ]
        _overwrite(engine, key, _joined(without))
    assert kept, f"nothing is stored of group {group_index}"
    try:
        yield
    finally:
        for key, content in kept.items():
            _overwrite(engine, key, content)


def least_change(before: Result, after: Result) -> float:
    """A lower bound of the largest change among the first token's log-probabilities.

    Only the top few are known. A token that is not among them any more lies at most as high as the last of them.
    """
    first, other = before.logprobs[0], after.logprobs[0]
    changes = [abs(value - other[token]) for token, value in first.items() if token in other]
    for mine, theirs in ((first, other), (other, first)):
        changes += [value - min(theirs.values()) for token, value in mine.items() if token not in theirs]
    return max(changes)


def _spec(group: Any, layer_name: str) -> Any:
    per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return per_layer[layer_name] if per_layer else group.kv_cache_spec


def _page_bytes(engine: Engine, layer_name: str) -> int:
    return engine.page(layer_name, 0).numel()


def _slices(spec: Any, page_bytes: int) -> dict[str, list[slice]]:
    """For each part the bytes of a page that are it."""
    if shapes := getattr(spec, "shapes", None):
        ends = [0]
        for shape, dtype in zip(shapes, spec.dtypes, strict=True):
            ends.append(ends[-1] + torch.empty(shape, dtype=dtype, device="meta").nbytes)
        assert ends[-1] == page_bytes
        # The first is what the convolution remembers of its inputs, which is all that a short convolution has.
        names = ("convolution", "state")[: len(shapes)]
        return {name: [slice(*bounds)] for name, bounds in zip(names, itertools.pairwise(ends), strict=True)}
    if "MLA" in type(spec).__name__:
        return {"latent": [slice(0, page_bytes)]}
    # The CPU's attention keeps all keys of a head before all its values.
    head, half = page_bytes // spec.num_kv_heads, page_bytes // spec.num_kv_heads // 2
    return {
        "K": [slice(i * head, i * head + half) for i in range(spec.num_kv_heads)],
        "V": [slice(i * head + half, (i + 1) * head) for i in range(spec.num_kv_heads)],
    }


def _without(page: torch.Tensor, spec: Any, part: str) -> torch.Tensor:
    changed = page.clone()
    for bounds in _slices(spec, page.numel())[part]:
        changed[bounds] = 0
    return changed


def _joined(pages: list[list[torch.Tensor]]) -> bytes:
    """Ranges of layers and their blocks, in the order of a stored chunk: block by block, each page padded to whole
    words of 16."""
    content = (page.numpy().tobytes() for block in zip(*pages, strict=True) for page in block)
    return b"".join(page + bytes(-len(page) % 16) for page in content)


def _overwrite(engine: Engine, key: bytes, content: bytes) -> None:
    offset = 0
    for view in stored_views(engine, key):
        view[:] = content[offset : offset + len(view)]
        offset += len(view)
    assert offset == len(content)
