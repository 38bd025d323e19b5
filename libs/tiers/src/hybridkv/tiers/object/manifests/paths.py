"""Prefix graph: the parent of each prefix, and its chunks in the store. Manifests are built from the graph.

The graph contains the chunks that this engine has stored, and the paths of the manifests that it has read. Its size is
limited. If the beginning of a path was forgotten, no manifest is written for the path: a partial manifest would hide a
complete one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence, Set

from hybridkv.tiers.contract import Key
from hybridkv.tiers.object.format.manifest import ManifestNode, ManifestPart
from hybridkv.tiers.object.names import is_manifest_point, prefix_of, tag_of
from hybridkv.tiers.object.packs import Stored

MAX_NODES = 131_072
"""Limit of prefixes and chunks in the prefix graph, together."""
_BEGINNING = b""
"""Parent of the first prefix of a path."""


class _Step:
    __slots__ = ("before", "is_learned", "needed_tags", "parts")

    def __init__(self) -> None:
        self.before: bytes | None = None
        """Parent prefix; None while unknown."""
        self.parts: dict[bytes, ManifestPart] = {}
        """Stored chunks that end at this prefix, by tag."""
        self.needed_tags: frozenset[bytes] = frozenset()
        """Tags that `parts` must contain before a manifest includes this prefix."""
        self.is_learned = False
        """True if the prefix was read from a manifest. Then it is unknown which of its parts are optional."""


class Paths:
    """Known prefixes, least recently added or learned first: reads do not change the order. Used by one thread.

    Args:
        max_nodes: limit of prefixes and parts together.
    """

    def __init__(self, max_nodes: int) -> None:
        self._max_nodes = max_nodes
        self._steps: OrderedDict[bytes, _Step] = OrderedDict()
        self._num_parts = 0

    def add(self, stored: Sequence[Stored]) -> list[bytes]:
        """Add stored chunks. Returns their prefixes, in order."""
        ended: dict[bytes, None] = {}
        for key, place, needs in stored:
            prefix = prefix_of(key)
            step = self._step(prefix)
            self._put(step, ManifestPart(tag_of(key), place.pack, place.offset, place.num_bytes))
            for need in needs:
                self._step(prefix_of(need)).needed_tags |= {tag_of(need)}
            before = next((other for need in needs if (other := prefix_of(need)) != prefix), _BEGINNING)
            if before or (step.before is None and not needs):
                step.before = before
            ended[prefix] = None
        return list(ended)

    def learn(
        self,
        path: Iterable[ManifestNode],
        is_bad: Callable[[ManifestPart], bool] = lambda part: False,
        was_seen: Callable[[str], bool] = lambda pack: False,
    ) -> None:
        """Add the path of a manifest. Its places replace known places, because older packs may be deleted, but a place
        stays if its pack was seen a short time ago. A bad part is not added. If no other place of the part is known,
        the part counts as missing: no manifest includes the part or a later prefix until the part is stored again."""
        before = _BEGINNING
        for node in path:
            step = self._step(node.prefix)
            step.before = before
            step.is_learned = True
            for part in node.parts:
                known = step.parts.get(part.tag)
                if not is_bad(part):
                    if known is None or not was_seen(known.pack):
                        self._put(step, part)
                elif known is None:
                    step.needed_tags |= {part.tag}
            before = node.prefix

    def manifest_prefixes(self, prefixes: Sequence[bytes], manifest_every: int) -> list[bytes]:
        """Prefixes that need a manifest: manifest points, and prefixes that no other given prefix extends."""
        followed = {self._steps[prefix].before for prefix in prefixes}
        return [prefix for prefix in prefixes if prefix not in followed or is_manifest_point(prefix, manifest_every)]

    def up_to(self, prefix: bytes) -> list[ManifestNode] | None:
        """The stored chunks of a path, from its beginning to this prefix. None if a prefix of the path or a
        needed part is unknown: a manifest with a gap would block a complete one. None if no chunk ends at the
        prefix."""
        path: list[ManifestNode] = []
        seen: set[bytes] = set()
        while prefix != _BEGINNING:
            step = self._steps.get(prefix)
            if step is None or step.before is None or prefix in seen or not step.needed_tags <= step.parts.keys():
                return None
            seen.add(prefix)
            path.append(ManifestNode(prefix, list(step.parts.values())))
            prefix = step.before
        return path[::-1] if path and path[0].parts else None

    def forget(self, key: Key, pack: str) -> None:
        """Remove a chunk if its place is in this pack, where its bytes are missing or wrong."""
        step = self._steps.get(prefix_of(key))
        if step is not None and (part := step.parts.get(tag_of(key))) is not None and part.pack == pack:
            del step.parts[tag_of(key)]
            self._num_parts -= 1
            if step.is_learned:
                step.needed_tags |= {tag_of(key)}

    def manifest_prefixes_between(self, prefix: bytes, last: bytes, manifest_every: int) -> list[bytes]:
        """`last`, and the manifest points before it, down to `prefix` or to the first unknown prefix."""
        ends = [last]
        at = self._steps.get(last)
        for _ in range(len(self._steps)):
            if last == prefix or at is None or not at.before:
                break
            last = at.before
            at = self._steps.get(last)
            if is_manifest_point(last, manifest_every):
                ends.append(last)
        return ends

    def manifest_prefixes_through(self, prefixes: Set[bytes], manifest_every: int) -> list[bytes]:
        """Manifest points and ends of all known paths that contain one of these prefixes, from the prefix on. Walks
        through all known prefixes once."""
        contains: dict[bytes, bool] = {}
        for prefix in self._steps:
            walked: list[bytes] = []
            at: bytes | None = prefix
            while at and at not in contains:
                contains[at] = at in prefixes
                walked.append(at)
                step = self._steps.get(at)
                at = None if contains[at] or step is None else step.before
            if (at and contains[at]) or (walked and contains[walked[-1]]):
                contains.update(dict.fromkeys(walked, True))
        followed = {step.before for step in self._steps.values()}
        return [
            prefix
            for prefix in self._steps
            if contains[prefix] and (prefix not in followed or is_manifest_point(prefix, manifest_every))
        ]

    def clear(self) -> None:
        """Forget everything."""
        self._steps.clear()
        self._num_parts = 0

    def _put(self, step: _Step, part: ManifestPart) -> None:
        self._num_parts += part.tag not in step.parts
        step.parts[part.tag] = part

    def _step(self, prefix: bytes) -> _Step:
        step = self._steps.get(prefix)
        if step is None:
            while self._steps and len(self._steps) + self._num_parts >= self._max_nodes:
                _, forgotten = self._steps.popitem(last=False)
                self._num_parts -= len(forgotten.parts)
            step = self._steps[prefix] = _Step()
        else:
            self._steps.move_to_end(prefix)
        return step
