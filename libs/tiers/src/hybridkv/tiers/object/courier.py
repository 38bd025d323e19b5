"""What an index of objects needs of whoever speaks with the store. Values, and a protocol; nothing here is sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from hybridkv.tiers.contract import Key
from hybridkv.tiers.object.known import PackPlace
from hybridkv.tiers.object.packs import Stored


class Found(NamedTuple):
    """What the store was found to hold of what one question asked for."""

    request: int
    places: Mapping[Key, PackPlace]
    """Of what it holds; all else it does not."""
    heard_s: float
    """When, by the index's clock."""


class Unanswered(NamedTuple):
    """There will be no answer to a question."""

    request: int
    heard_s: float


class Moved(NamedTuple):
    """Somebody began another epoch: what was found or stored before is nobody's to offer."""

    heard_s: float


News = Found | Unanswered | Moved


class Courier(Protocol):
    """Takes questions to the store and brings answers. No call waits; answers come from another thread into `news`."""

    @property
    def namespace(self) -> str | None:
        """Under which everything is now. None while that is not known, because the store was not reached yet: nothing
        can be stored."""
        ...

    @property
    def takes_objects(self) -> bool:
        """False: the store is full, say, or only read with these credentials. What lies there is found all the same."""
        ...

    @property
    def news(self) -> deque[News]:
        """What arrived, in order. The index takes it from the left."""
        ...

    def ask(self, request: int, keys: Sequence[Key], until_s: float) -> bool:
        """Find out which of these the store holds; they are in the order of their path. False: nobody can be asked,
        and there will be no answer."""
        ...

    def publish(self, stored: Sequence[Stored]) -> None:
        """These lie in the store by now: let others find them."""
        ...

    def retract(self, key: Key, place: PackPlace) -> None:
        """What lies there is gone, or is not what it should be: name it no more, and let a manifest that does be
        written anew."""
        ...

    def clear(self, *, is_for_all: bool) -> None:
        """Forget what was stored and found. For all: nobody shall find again what is stored by now."""
        ...

    def close(self) -> None:
        """End everything, within a bounded time. Repeatable."""
        ...
