"""Lookup client of an object store, as an index needs it: the events it brings, and a protocol. Sends nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from hybridkv.tiers.contract import Key
from hybridkv.tiers.object.packs import PackPlace, Stored
from hybridkv.tiers.remote import LookupClient


class Found(NamedTuple):
    """The store's answer to a lookup."""

    request: int
    places: Mapping[Key, PackPlace]
    """Of the keys that it holds."""
    heard_s: float
    """When, by the index's clock."""


class Unanswered(NamedTuple):
    """There will be no answer to a lookup."""

    request: int
    heard_s: float


class Moved(NamedTuple):
    """Another engine began an epoch: chunks that were found or stored before must not be offered."""

    heard_s: float


News = Found | Unanswered | Moved


class ObjectClient(LookupClient, Protocol):
    """Its `news` are `News`."""

    @property
    def namespace(self) -> str | None:
        """Prefix of all current names. None while the store was not reached yet: nothing can be stored."""
        ...

    @property
    def takes_objects(self) -> bool:
        """False where the store is full, say, or these credentials may only read. Chunks in it are found all the
        same."""
        ...

    def ask(self, request: int, keys: Sequence[Key], until_s: float) -> bool:
        """Look up these keys, which are in the order of their path. False: it cannot be sent, and there will be no
        answer."""
        ...

    def publish(self, stored: Sequence[Stored]) -> None:
        """Let others find these chunks, which lie in the store by now."""
        ...

    def retract(self, key: Key, place: PackPlace) -> None:
        """The bytes at a place are gone or wrong: for a while no answer of a later lookup names it, and manifests that
        name it are written anew."""
        ...

    def clear(self, *, is_for_all: bool) -> None:
        """Forget what was stored and found. For all: no engine shall find again what is stored by now."""
        ...
