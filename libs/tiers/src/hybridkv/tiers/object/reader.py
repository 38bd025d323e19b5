"""Reads manifests: their size before their body, their seal before what they say.

A manifest whose seal is wrong is read once more in another way. If that fails too, this host leaves that version of it
alone for a while. It deletes nothing: another host may read it well.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from hybridkv.tiers.object.bodies import Body, Room, read_body
from hybridkv.tiers.object.format.manifest import is_sealed
from hybridkv.tiers.object.format.seals import Seals
from hybridkv.tiers.object.options import ObjectOptions
from hybridkv.tiers.object.quarantine import Quarantine

if TYPE_CHECKING:
    from hybridkv.tiers.object.store import Store

logger = logging.getLogger(__name__)


class ManifestReader:
    """Used on one event loop.

    Args:
        store: that holds them.
        seals: of the fleet.
        options: bounds.
        clock: seconds.
    """

    def __init__(self, store: Store, seals: Seals, options: ObjectOptions, clock: Callable[[], float]) -> None:
        self._store = store
        self._seals = seals
        self._options = options
        self._room = Room(max(options.reading_bytes, options.manifest_bytes))
        self.requests = asyncio.Semaphore(options.max_requests)
        """To the store, at one time."""
        self._bad: Quarantine[str, str] = Quarantine(options.max_asked, options.bad_s, clock)
        """Tags of the versions that are not read again, by name. No store's tag is empty."""

    def distrust(self, name: str, tag: str | None) -> None:
        """Its seal holds or not: this version says nothing that can be used."""
        log = logger.debug if self._bad else logger.warning
        log("a manifest in the object store is not what this fleet writes; this host leaves it alone: %s", name)
        self._bad.add(name, tag or "")

    def trust(self, name: str) -> None:
        """It was written anew."""
        self._bad.release(name)

    async def read(self, name: str, *, is_again: bool = False) -> Body | None:
        """A manifest whose seal holds. None where there is none.

        Args:
            name: of the object.
            is_again: also where this version was found bad before.

        Raises:
            Exception: of obstore, where the store gave no answer.
        """
        from obstore.exceptions import NotModifiedError

        unlike = None if is_again else self._bad.get(name) or None
        try:
            body, tag = await self._sealed(name, unlike, is_ranged=False)
            if body is None:
                body = await self._sealed_otherwise(name)
        except (FileNotFoundError, NotModifiedError):
            return None
        if body is None:
            self.distrust(name, tag)
        else:
            self.trust(name)
        return body

    async def _sealed(self, name: str, unlike: str | None, *, is_ranged: bool) -> tuple[Body | None, str | None]:
        options = self._options
        async with (
            self.requests,
            read_body(
                self._store, name, options.manifest_bytes, self._room, unlike=unlike, is_ranged=is_ranged
            ) as body,
        ):
            holds = body.data is not None and is_sealed(self._seals, name, body.data)
            return body if holds else None, body.tag

    async def _sealed_otherwise(self, name: str) -> Body | None:
        try:
            return (await self._sealed(name, None, is_ranged=True))[0]
        except Exception as error:  # an empty object has no range; the first answer stands
            logger.debug("a manifest could not be read a second time: %s", type(error).__name__)
            return None
