"""Which block hashes were announced how often, so that a subscriber hears of each once and loses none too early.

Two chunks may begin with the same blocks, and two stores may hold the same ones. A subscriber keeps a set: the second
announcement would tell it nothing, and the first removal would take away what another still holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import msgspec

from hybridkv.connectors.vllm import compat

_Said: TypeAlias = tuple[Any, Any, Any]
"""Medium, group and hash."""


class ToldHashes:
    """Counts by medium, group and hash. As large as what is announced."""

    def __init__(self) -> None:
        self._counts: dict[_Said, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def pass_on(self, events: Iterable[Any]) -> list[Any]:
        """What of one step's events tells a subscriber something new. Of other kinds of events, everything.

        What was taken back and given again in one step, while another held it, is taken back and said again, once:
        whoever does so believes that the subscriber forgot it.
        """
        said: list[Any] = []
        taken_back: set[_Said] = set()
        said_again: set[_Said] = set()
        for event in events:
            match type(event).__name__:
                case "BlockStored":
                    said += self._stored(event, taken_back, said_again)
                case "BlockRemoved":
                    said += self._removed(event, taken_back)
                case _:
                    said.append(event)
        return said

    def _stored(self, event: Any, taken_back: set[_Said], said_again: set[_Said]) -> Iterator[Any]:
        is_new, again = [], []
        for block_hash, place in zip(event.block_hashes, _places(event), strict=True):
            count = self._counts.get(place, 0)
            self._counts[place] = count + 1
            is_again = place in taken_back and place not in said_again
            is_new.append(count == 0 or is_again)
            if is_again:
                said_again.add(place)
                again.append(block_hash)
        if again:
            yield compat.block_removed(
                block_hashes=again, medium=event.medium, group_idx=getattr(event, "group_idx", None)
            )
        if all(is_new):
            yield event
        elif any(is_new):
            yield from _runs(event, is_new)

    def _removed(self, event: Any, taken_back: set[_Said]) -> Iterator[Any]:
        gone = []
        for block_hash, place in zip(event.block_hashes, _places(event), strict=True):
            count = self._counts.pop(place, 1) - 1
            if count:
                self._counts[place] = count
                taken_back.add(place)
            else:
                gone.append(block_hash)
                taken_back.discard(place)
        if len(gone) == len(event.block_hashes):
            yield event
        elif gone:
            yield msgspec.structs.replace(event, block_hashes=gone)


def _places(event: Any) -> list[_Said]:
    group = getattr(event, "group_idx", None)
    return [(event.medium, group, block_hash) for block_hash in event.block_hashes]


def _runs(event: Any, is_new: list[bool]) -> Iterator[Any]:
    """The parts of an event that are new, each with its own tokens."""
    hashes, size = event.block_hashes, event.block_size
    extra_keys = getattr(event, "extra_keys", None)
    if not size or len(event.token_ids) != len(hashes) * size:
        yield event  # it does not say which tokens are whose
        return
    first = 0
    while first < len(hashes):
        if not is_new[first]:
            first += 1
            continue
        end = first
        while end < len(hashes) and is_new[end]:
            end += 1
        fields = {
            "block_hashes": hashes[first:end],
            "parent_block_hash": hashes[first - 1] if first else event.parent_block_hash,
            "token_ids": event.token_ids[first * size : end * size],
        }
        if extra_keys is not None and len(extra_keys) == len(hashes):
            fields["extra_keys"] = extra_keys[first:end]
        yield msgspec.structs.replace(event, **fields)
        first = end
