"""Announcements of stored chunks to a router: a part is announced while a request can resume with it.

A router gets sets of blocks and assumes that a request hits the longest prefix. This is wrong if a state or a window is
missing: then the FULL group holds more than a request can resume with. So a tier's part of a chunk is announced exactly
while a resumable boundary needs it (`needed_ends`). A boundary is resumable if the tiers together hold all parts that
it needs, of every group. For FULL groups, the path to every resumable boundary is announced; for other groups, the
parts that such boundaries read.

The chunks form a tree. The cost of a change depends on the chunks that it changes and on the length of a window, not
on the number of chunks. The caller defines the content of an announcement (`payload`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from hybridkv.planner.coverage import needed_ends
from hybridkv.planner.groups import CacheSpec, GroupKind
from hybridkv.planner.lookup import LookupResult

P = TypeVar("P")


class ChunkNode(NamedTuple, Generic[P]):
    """Description of one chunk of one path.

    Args:
        name: identity of all tokens up to the end of the chunk.
        parent: name of the previous chunk; None for the first one.
        end_token: end of the chunk.
        keys: keys of the chunk's parts, one for each of `CacheSpec.stored_groups`, in that order.
        payload: content of the announcement, for the caller.
    """

    name: bytes
    parent: bytes | None
    end_token: int
    keys: tuple[bytes, ...]
    payload: P


class Announcement(NamedTuple, Generic[P]):
    """A part of a chunk in one tier, for a router."""

    tier: int
    group_index: int
    end_token: int
    payload: P


class News(NamedTuple, Generic[P]):
    """Changes. In `stored` a prefix comes before its continuation, in `removed` after it."""

    stored: list[Announcement[P]]
    removed: list[Announcement[P]]


@dataclass(slots=True, eq=False)
class _Node(Generic[P]):
    chunk: ChunkNode[P]
    depth: int
    """Number of chunks from the beginning of the path, this one included."""
    held: list[int]
    """For each tier, the parts that it holds, as bits."""
    pending: list[int]
    """For each tier, the parts in flight into it, as bits."""
    announced: list[int]
    """For each tier, the announced parts, as bits."""
    runs: list[int]
    """For each group, the length of the run of held chunks that ends here, at most `_longest_run`. FULL groups: all
    chunks of the path, or 0."""
    needs: list[int]
    """For each group that is not FULL, the number of resumable boundaries that need its part."""
    parent: _Node[P] | None = None
    children: dict[bytes, _Node[P]] = field(default_factory=dict)
    num_resumable_branches: int = 0
    """Number of children that lead to a resumable boundary, plus one if the end of this chunk is one."""
    is_resumable: bool = False

    @property
    def has_no_parts(self) -> bool:
        """True if no tier holds a part of the chunk, and no part is in flight."""
        return not any(self.held) and not any(self.pending)


class Announcer(Generic[P]):
    """Announced parts of all tiers. `take` forgets a changed chunk if it has no part in any tier or in flight.

    Args:
        spec: the model's groups.
        num_tiers: number of tiers; a tier is a number below this.
    """

    def __init__(self, spec: CacheSpec, num_tiers: int) -> None:
        self._spec = spec
        self._num_tiers = num_tiers
        self._groups = spec.stored_groups
        self._is_full = [spec.groups[index].kind is GroupKind.FULL for index in self._groups]
        self._full_mask = sum(1 << place for place, is_full in enumerate(self._is_full) if is_full)
        self._others = [place for place, is_full in enumerate(self._is_full) if not is_full]
        self._longest_runs = [_longest_run(spec, index) for index in self._groups]
        self._nodes: dict[bytes, _Node[P]] = {}
        self._by_key: dict[bytes, list[tuple[int, _Node[P]]]] = {}
        self._orphans: dict[bytes, dict[bytes, _Node[P]]] = {}
        """Chunks with an unknown parent, by the name of the parent."""
        self._lengths: dict[int, tuple[int, ...]] = {}
        """For each boundary, the number of chunks that it needs of each group."""
        self._changed: dict[bytes, _Node[P]] = {}
        self.num_held = 0
        """Number of held parts, counted once for each tier."""
        self.num_announced = 0
        """Number of announced parts."""
        self.num_on_paths = 0
        """Number of chunks on a path to a resumable boundary; 0 without a FULL group."""

    # Questions.

    def knows(self, name: bytes) -> bool:
        """True if this chunk was described and is not forgotten."""
        return name in self._nodes

    @property
    def num_chunks(self) -> int:
        return len(self._nodes)

    def known_keys(self) -> Iterator[bytes]:
        """Keys of all parts of all known chunks."""
        return iter(list(self._by_key))

    def announced(self) -> list[Announcement[P]]:
        """All announced parts as of the last `take`, prefixes first."""
        return _in_order(
            each
            for node in self._nodes.values()
            for tier in range(self._num_tiers)
            for each in self._parts(node, tier, node.announced[tier])
        )

    # Events.

    def describe(self, chunk: ChunkNode[P]) -> None:
        """Adds a chunk of a request, unless it is known. `note` reports the parts that tiers hold.

        Raises:
            ValueError: the number of keys is not the number of stored groups.
        """
        if chunk.name in self._nodes:
            return
        if len(chunk.keys) != len(self._groups):
            raise ValueError(f"expected a key for each of the groups {self._groups}, got {len(chunk.keys)}")
        tiers, groups = self._num_tiers, len(self._groups)
        depth = -(-chunk.end_token // self._spec.chunk_tokens)
        node = _Node(chunk, depth, [0] * tiers, [0] * tiers, [0] * tiers, [0] * groups, [0] * groups)
        self._nodes[chunk.name] = self._changed[chunk.name] = node
        for place, key in enumerate(chunk.keys):
            self._by_key.setdefault(key, []).append((place, node))
        if chunk.parent is not None:
            node.parent = self._nodes.get(chunk.parent)
            siblings = self._orphans.setdefault(chunk.parent, {}) if node.parent is None else node.parent.children
            siblings[chunk.name] = node
        # No part of this chunk is held yet, so nothing changes for its children.
        node.children = self._orphans.pop(chunk.name, {})
        for child in node.children.values():
            child.parent = node

    def note(self, tier: int, key: bytes, answer: LookupResult) -> None:
        """Records a tier's current answer for a key. Ignores keys of unknown chunks."""
        for place, node in self._by_key.get(key, ()):
            bit = 1 << place
            self._changed[node.chunk.name] = node
            if answer is LookupResult.PENDING:
                node.pending[tier] |= bit
            else:
                node.pending[tier] &= ~bit
            is_held = answer is LookupResult.HIT
            if is_held != bool(node.held[tier] & bit):
                node.held[tier] ^= bit
                self.num_held += 1 if is_held else -1
                self._update_runs(node, place)

    def take(self) -> News[P]:
        """Net changes since the last call. Forgets changed chunks that have no part in any tier or in flight."""
        stored: list[Announcement[P]] = []
        removed: list[Announcement[P]] = []
        changed, self._changed = self._changed, {}
        for node in changed.values():
            needed = self._needed(node)
            for tier in range(self._num_tiers):
                wanted, announced = node.held[tier] & needed, node.announced[tier]
                if wanted != announced:
                    stored += self._parts(node, tier, wanted & ~announced)
                    removed += self._parts(node, tier, announced & ~wanted)
                    node.announced[tier] = wanted
            if node.has_no_parts:
                self._forget(node)
        self.num_announced += len(stored) - len(removed)
        return News(_in_order(stored), _in_order(removed)[::-1])

    # Consequences of a change.

    def _update_runs(self, first: _Node[P], place: int) -> None:
        """Updates the runs of a chunk and of the chunks after it, when a part was added or removed."""
        waiting = [first]
        while waiting:
            node = waiting.pop()
            run = self._run(node, place)
            if run != node.runs[place]:
                node.runs[place] = run
                self._update_resumable(node)
                waiting += node.children.values()

    def _run(self, node: _Node[P], place: int) -> int:
        if not any(held >> place & 1 for held in node.held):
            return 0
        before = 0 if node.parent is None else node.parent.runs[place]
        if self._is_full[place]:
            return node.depth if before == node.depth - 1 else 0
        return min(before + 1, self._longest_runs[place])

    def _update_resumable(self, node: _Node[P]) -> None:
        """Updates `is_resumable` of the chunk. After a change, also updates the path to the chunk, and `needs` of the
        parts, of this chunk and of earlier ones, that the end of this chunk needs."""
        lengths = self._lengths_at(node.chunk.end_token, node.depth)
        is_resumable = all(run >= length for run, length in zip(node.runs, lengths, strict=True))
        if is_resumable == node.is_resumable:
            return
        node.is_resumable = is_resumable
        change = 1 if is_resumable else -1
        if self._full_mask:
            self._update_path(node, change)
        for place in self._others:
            needed: _Node[P] | None = node
            for _ in range(lengths[place]):
                assert needed is not None  # the run is or was at least this long
                needed.needs[place] += change
                self._changed[needed.chunk.name] = needed
                needed = needed.parent

    def _update_path(self, last: _Node[P], change: int) -> None:
        """Adds a resumable boundary to the path that ends here, or removes one. All its chunks are known."""
        node: _Node[P] | None = last
        while node is not None:
            was_on_path = node.num_resumable_branches > 0
            node.num_resumable_branches += change
            if was_on_path == (node.num_resumable_branches > 0):
                return
            self.num_on_paths += change
            self._changed[node.chunk.name] = node
            node = node.parent

    def _needed(self, node: _Node[P]) -> int:
        """Parts that a resumable boundary needs, as bits."""
        needed = self._full_mask if node.num_resumable_branches else 0
        for place in self._others:
            if node.needs[place]:
                needed |= 1 << place
        return needed

    def _lengths_at(self, end_token: int, depth: int) -> tuple[int, ...]:
        lengths = self._lengths.get(end_token)
        if lengths is None:
            lengths = self._lengths[end_token] = tuple(
                depth if is_full else len(needed_ends(self._spec, index, end_token, 0))
                for index, is_full in zip(self._groups, self._is_full, strict=True)
            )
        return lengths

    def _parts(self, node: _Node[P], tier: int, mask: int) -> Iterator[Announcement[P]]:
        for place, index in enumerate(self._groups):
            if mask >> place & 1:
                yield Announcement(tier, index, node.chunk.end_token, node.chunk.payload)

    def _forget(self, node: _Node[P]) -> None:
        """Forgets a chunk that no tier holds. Its children have no known parent until it is described again."""
        chunk = node.chunk
        del self._nodes[chunk.name]
        for place, key in enumerate(chunk.keys):
            others = [each for each in self._by_key[key] if each != (place, node)]
            if others:
                self._by_key[key] = others
            else:
                del self._by_key[key]
        if chunk.parent is not None:
            if node.parent is not None:
                del node.parent.children[chunk.name]
            else:
                siblings = self._orphans[chunk.parent]
                del siblings[chunk.name]
                if not siblings:
                    del self._orphans[chunk.parent]
        if node.children:
            self._orphans[chunk.name] = node.children
            for child in node.children.values():
                child.parent = None


def _in_order(announcements: Iterable[Announcement[P]]) -> list[Announcement[P]]:
    return sorted(announcements, key=lambda each: (each.end_token, each.tier, each.group_index))


def _longest_run(spec: CacheSpec, group_index: int) -> int:
    """Upper bound of the chunks that a boundary needs of a group that is not FULL."""
    group, chunk = spec.groups[group_index], spec.chunk_tokens
    sizes: Sequence[int | None] = (group.window_tokens, group.align_tokens, group.block_tokens)
    return 2 + sum(-(-size // chunk) for size in sizes if size is not None)
