"""What of a request that has ended no state can use: it may go first, if nobody comes for it, and nothing that others
have.

A model with RECURRENT groups resumes only where there is a state. Chunks behind the deepest one of a path, an answer's
say, are computed again by whoever needs them, and stored again. Until then they show where a next turn parts from what
is stored, which is where it leaves a state. So they stay in their turn for a while: in a simulation of chats in tiers
that hold 3 to 100 % of what is used, giving them up at once was worth up to 4.5 points of the hit rate and cost up to
0.7; after a quarter of the tier's turnover, up to 2.6, and 0.03. `planner.retain` decides; what is known here is who
brought a chunk, and whether another request has met it since.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

from hybridkv.connectors.vllm.stats import Recorder
from hybridkv.connectors.vllm.stored_path import StoredPath
from hybridkv.planner import CacheSpec, retain
from hybridkv.tiers.stack import TierStack

PATIENCE: Final = 4
"""Somebody may come until this part of the largest tier of this engine's own was stored anew."""
MAX_WAITING: Final = 65_536
"""Chunks that wait so long. Where there are more, those that wait longest go first at once."""


class _Ended(NamedTuple):
    at_bytes: int
    """What had been stored by then."""
    left: StoredPath
    """What waits, in the order in which it may go: the rest of a path would be kept for nothing."""


class Stranded:
    """Of the requests of one connector. Keeps nothing of requests that are forgotten before they end.

    Args:
        spec: the model's groups.
        stack: the tiers.
        recorder: counts what happens.
    """

    def __init__(self, spec: CacheSpec, stack: TierStack, recorder: Recorder) -> None:
        self._spec = spec
        self._stack = stack
        self._recorder = recorder
        self._brought_by: WeakValueDictionary[bytes, StoredPath] = WeakValueDictionary()
        """Of what one request brought and no other has met."""
        self._ended: deque[_Ended] = deque()
        self._num_waiting = 0
        self._stored_bytes = 0
        own = [index.capacity_bytes for index in stack.slower.values() if not index.answers_late]
        self._patience_bytes = max([stack.only_near.capacity_bytes, *own]) // PATIENCE

    def note(self, path: StoredPath, key: bytes, num_bytes: int, *, is_new: bool) -> None:
        """A request stores a chunk of so many bytes, or meets one that is stored already."""
        if not self._spec.recurrent_groups:
            return
        self._stored_bytes += num_bytes * is_new
        brought_by = self._brought_by.get(key)
        if brought_by is None:
            # What a slower tier has already was stored before.
            if is_new and not self._stack.is_below(key):
                self._brought_by[key] = path
        elif brought_by is not path:
            del self._brought_by[key]

    def meet(self, path: StoredPath, keys: Iterable[bytes]) -> None:
        """`note` of chunks that are all stored already."""
        if not self._spec.recurrent_groups:
            return
        for key in keys:
            brought_by = self._brought_by.get(key)
            if brought_by is not None and brought_by is not path:
                del self._brought_by[key]

    def on_over(self, path: StoredPath) -> None:
        """The request has ended, and nothing of it comes any more."""
        if not self._spec.recurrent_groups:
            return
        keys = path.keys
        own = {part for part, key in keys.items() if self._brought_by.get(key) is path}
        superseded = {part for part, key in keys.items() if self._stack.is_demoted(key)}
        beyond = retain(self._spec, keys.keys(), superseded, own, path.resumed_tokens or 0).beyond
        for part in own.difference(beyond):
            del self._brought_by[keys[part]]
        if beyond:
            left = StoredPath({part: keys[part] for part in beyond})
            for key in left.keys.values():
                self._brought_by[key] = left
            self._ended.append(_Ended(self._stored_bytes, left))
            self._num_waiting += len(beyond)
        self._give_up()

    def _give_up(self) -> None:
        """What waited long enough, and nobody has met."""
        ended, due_bytes = self._ended, self._stored_bytes - self._patience_bytes
        while ended and (ended[0].at_bytes <= due_bytes or self._num_waiting > MAX_WAITING):
            waiting = ended.popleft().left
            self._num_waiting -= len(waiting.keys)
            left = [(part, key) for part, key in waiting.keys.items() if self._brought_by.get(key) is waiting]
            for part, key in left:
                del self._brought_by[key]
                self._recorder.stranded(self._spec.groups[part[0]].kind)
            self._stack.demote([key for _, key in left])

    def forget(self) -> None:
        """Nothing that was stored is there any more."""
        self._brought_by.clear()
        self._ended.clear()
        self._num_waiting = 0
