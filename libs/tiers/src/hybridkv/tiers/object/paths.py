"""Which prefix follows which, and what of each lies in the store: what a manifest is made of.

Learned from what this engine stores and from the manifests that it reads. Bounded: of a path whose beginning is
forgotten nothing is named, because a manifest of a part would hide one of all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from hybridkv.tiers.contract import Key
from hybridkv.tiers.object.format.manifest import Node, Part
from hybridkv.tiers.object.names import is_boundary, prefix_of, tag_of
from hybridkv.tiers.object.packs import Stored

_BEGINNING = b""
"""What comes before the first prefix of a path."""


class _Step:
    __slots__ = ("before", "is_learned", "needed", "parts")

    def __init__(self) -> None:
        self.before: bytes | None = None
        """The prefix before this one; None while it is not known."""
        self.parts: dict[bytes, Part] = {}
        """By tag."""
        self.needed: frozenset[bytes] = frozenset()
        """Tags without whose parts what follows is worth nothing."""
        self.is_learned = False
        """A manifest told of it: what may be left out of it is not known here."""


class Paths:
    """All prefixes that are remembered. Used by one thread.

    Args:
        max_nodes: of them, and of their parts.
    """

    def __init__(self, max_nodes: int) -> None:
        self._max_nodes = max_nodes
        self._steps: OrderedDict[bytes, _Step] = OrderedDict()
        self._num_parts = 0

    def add(self, stored: Sequence[Stored]) -> list[bytes]:
        """What was stored. The prefixes that its chunks end, in order."""
        ended: dict[bytes, None] = {}
        for key, place, needs in stored:
            prefix = prefix_of(key)
            step = self._step(prefix)
            self._put(step, Part(tag_of(key), place.pack, place.offset, place.num_bytes))
            for need in needs:
                self._step(prefix_of(need)).needed |= {tag_of(need)}
            before = next((other for need in needs if (other := prefix_of(need)) != prefix), _BEGINNING)
            if before or (step.before is None and not needs):
                step.before = before
            ended[prefix] = None
        return list(ended)

    def learn(self, path: Iterable[Node], is_bad: Callable[[Part], bool] = lambda part: False) -> None:
        """What a manifest says. A part that is bad is missing: nothing behind it is named before it is stored again."""
        before = _BEGINNING
        for node in path:
            step = self._step(node.prefix)
            step.before = before
            step.is_learned = True
            for part in node.parts:
                if part.tag in step.parts:
                    continue
                if is_bad(part):
                    step.needed |= {part.tag}
                else:
                    self._put(step, part)
            before = node.prefix

    def ends(self, prefixes: Sequence[bytes], boundary_every: int) -> list[bytes]:
        """Those of these at which a manifest is to stand: where nothing of them follows, and boundaries."""
        followed = {self._steps[prefix].before for prefix in prefixes}
        return [prefix for prefix in prefixes if prefix not in followed or is_boundary(prefix, boundary_every)]

    def up_to(self, prefix: bytes) -> list[Node] | None:
        """All that is stored of a path, from its beginning to this prefix. None where something of it that is needed is
        not known: a manifest with a hole would stand in the way of one without."""
        path: list[Node] = []
        seen: set[bytes] = set()
        while prefix != _BEGINNING:
            step = self._steps.get(prefix)
            if step is None or step.before is None or prefix in seen or not step.needed <= step.parts.keys():
                return None
            seen.add(prefix)
            path.append(Node(prefix, list(step.parts.values())))
            prefix = step.before
        return path[::-1]

    def forget(self, key: Key, pack: str) -> None:
        """A chunk is not in this pack any more, or never was."""
        step = self._steps.get(prefix_of(key))
        if step is not None and (part := step.parts.get(tag_of(key))) is not None and part.pack == pack:
            del step.parts[tag_of(key)]
            self._num_parts -= 1
            if step.is_learned:
                step.needed |= {tag_of(key)}

    def behind(self, prefix: bytes, last: bytes, boundary_every: int) -> list[bytes]:
        """Where manifests stand from this prefix on, up to the last one, which is among them."""
        ends = [last]
        at = self._steps.get(last)
        for _ in range(len(self._steps)):
            if last == prefix or at is None or not at.before:
                break
            last = at.before
            at = self._steps.get(last)
            if is_boundary(last, boundary_every):
                ends.append(last)
        return ends

    def clear(self) -> None:
        """Nothing is stored any more."""
        self._steps.clear()
        self._num_parts = 0

    def _put(self, step: _Step, part: Part) -> None:
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
