"""What a router may be told of the chunks that tiers hold: a part counts where a request can resume with it.

A router sees sets of blocks, and takes the longest prefix for what a request will hit. That is wrong where a state or a
window is missing: the FULL group reaches deeper than any request can resume. So a part is announced in each tier that
holds it exactly while some boundary needs it (`needed_ends`) at which every group has all that it needs, in whatever
tier. Of the FULL groups this leaves the path to every resumable boundary; of the others what such boundaries read.

Kept as a tree and changed step by step. What one change costs is bounded by the chunks whose state it changes, and by
how far a window reaches, never by how many there are. What a chunk is to a router, and how it is told, others know.
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
    """One chunk of one path, as it is described once.

    Args:
        name: stands for all tokens up to its end.
        parent: name of the chunk before it, None for the first one.
        end_token: where it ends.
        keys: of its parts, one for each of `CacheSpec.stored_groups`, in that order.
        payload: whatever its announcement is made of.
    """

    name: bytes
    parent: bytes | None
    end_token: int
    keys: tuple[bytes, ...]
    payload: P


class Announcement(NamedTuple, Generic[P]):
    """A part of a chunk that a tier holds and a router may count on, or may no longer."""

    tier: int
    group_index: int
    end_token: int
    payload: P


class News(NamedTuple, Generic[P]):
    """What changed: prefixes before what follows them in `stored`, and behind it in `removed`."""

    stored: list[Announcement[P]]
    removed: list[Announcement[P]]


@dataclass(slots=True, eq=False)
class _Node(Generic[P]):
    chunk: ChunkNode[P]
    depth: int
    """Chunks from the path's beginning on, itself included."""
    held: list[int]
    """For each tier the parts that it holds, a bit each."""
    pending: list[int]
    """The same of parts that are on their way."""
    told: list[int]
    """The same of parts that were announced and not taken back."""
    runs: list[int]
    """For each group how many chunks in a row, up to this one, some tier holds: of FULL ones all or none."""
    needs: list[int]
    """For each group that is not FULL how many resumable boundaries need its part."""
    parent: _Node[P] | None = None
    children: dict[bytes, _Node[P]] = field(default_factory=dict)
    num_paths: int = 0
    """Itself, where it is a resumable boundary, and those of its children that lead to one."""
    is_resumable: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether no tier has, or is about to have, any part of it."""
        return not any(self.held) and not any(self.pending)


class Announcer(Generic[P]):
    """Keeps what is announced of a number of tiers. Chunks that no tier has a part of are forgotten by `take`.

    Args:
        spec: the model's groups.
        num_tiers: whose contents are announced; a tier is a number below this.
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
        """By the name of a parent that is not known."""
        self._lengths: dict[int, tuple[int, ...]] = {}
        """By the end of a boundary, what it needs of each group; as many as a path has chunks."""
        self._changed: dict[bytes, _Node[P]] = {}
        self.num_held = 0
        """Parts that tiers hold, counted once for each tier."""
        self.num_told = 0
        """Those of them that were announced."""
        self.num_on_paths = 0
        """Chunks that lead to a boundary at which a request can resume; 0 where there is no FULL group."""

    # What is known.

    def knows(self, name: bytes) -> bool:
        """Whether this chunk was described and is not forgotten."""
        return name in self._nodes

    @property
    def num_chunks(self) -> int:
        return len(self._nodes)

    def known_keys(self) -> Iterator[bytes]:
        """Of all parts of all chunks that are known."""
        return iter(list(self._by_key))

    def announced(self) -> list[Announcement[P]]:
        """Everything that was announced and not taken back, prefixes first."""
        return _in_order(
            each for node in self._nodes.values() for tier in range(self._num_tiers) for each in self._of(node, tier)
        )

    def _of(self, node: _Node[P], tier: int) -> Iterator[Announcement[P]]:
        yield from self._parts(node, tier, node.told[tier])

    # What happens.

    def describe(self, chunk: ChunkNode[P]) -> None:
        """A chunk that a request has met. What tiers have of it is told by `note`, afterwards.

        Raises:
            ValueError: it has not one key for each stored group.
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
        # Nothing of it is held yet, so to its children nothing changes.
        node.children = self._orphans.pop(chunk.name, {})
        for child in node.children.values():
            child.parent = node

    def note(self, tier: int, key: bytes, answer: LookupResult) -> None:
        """What a tier says of a key now. Keys of chunks that were not described are passed over."""
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
                self._run_on(node, place)

    def take(self) -> News[P]:
        """What became so since the last call and still is."""
        stored: list[Announcement[P]] = []
        removed: list[Announcement[P]] = []
        changed, self._changed = self._changed, {}
        for node in changed.values():
            needed = self._needed(node)
            for tier in range(self._num_tiers):
                wanted, told = node.held[tier] & needed, node.told[tier]
                if wanted != told:
                    stored += self._parts(node, tier, wanted & ~told)
                    removed += self._parts(node, tier, told & ~wanted)
                    node.told[tier] = wanted
            if node.is_empty:
                self._forget(node)
        self.num_told += len(stored) - len(removed)
        return News(_in_order(stored), _in_order(removed)[::-1])

    # What follows.

    def _run_on(self, first: _Node[P], place: int) -> None:
        """A part of a chunk came or went in some tier: what that means to those that follow it."""
        waiting = [first]
        while waiting:
            node = waiting.pop()
            run = self._run(node, place)
            if run != node.runs[place]:
                node.runs[place] = run
                self._judge(node)
                waiting += node.children.values()

    def _run(self, node: _Node[P], place: int) -> int:
        if not any(held >> place & 1 for held in node.held):
            return 0
        before = 0 if node.parent is None else node.parent.runs[place]
        if self._is_full[place]:
            return node.depth if before == node.depth - 1 else 0
        return min(before + 1, self._longest_runs[place])

    def _judge(self, node: _Node[P]) -> None:
        """Whether it is a resumable boundary, and what that means to what is before it."""
        lengths = self._lengths_at(node.chunk.end_token, node.depth)
        is_resumable = all(run >= length for run, length in zip(node.runs, lengths, strict=True))
        if is_resumable == node.is_resumable:
            return
        node.is_resumable = is_resumable
        change = 1 if is_resumable else -1
        if self._full_mask:
            self._lead(node, change)
        for place in self._others:
            needed: _Node[P] | None = node
            for _ in range(lengths[place]):
                assert needed is not None  # a run that long was there
                needed.needs[place] += change
                self._changed[needed.chunk.name] = needed
                needed = needed.parent

    def _lead(self, last: _Node[P], change: int) -> None:
        """A path leads to one boundary more or less. Every chunk of it is there."""
        node: _Node[P] | None = last
        while node is not None:
            was_on_path = node.num_paths > 0
            node.num_paths += change
            if was_on_path == (node.num_paths > 0):
                return
            self.num_on_paths += change
            self._changed[node.chunk.name] = node
            node = node.parent

    def _needed(self, node: _Node[P]) -> int:
        """The parts that some resumable boundary needs."""
        needed = self._full_mask if node.num_paths else 0
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
        """A chunk that nobody has: its children wait for it to come back."""
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
    """The most chunks that any boundary needs of a group that is not FULL, rounded up."""
    group, chunk = spec.groups[group_index], spec.chunk_tokens
    sizes: Sequence[int | None] = (group.window_tokens, group.align_tokens, group.block_tokens)
    return 2 + sum(-(-size // chunk) for size in sizes if size is not None)
