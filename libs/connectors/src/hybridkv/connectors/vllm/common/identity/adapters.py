"""What adapters hold: a name and a path stand in the engine's block hashes, the weights behind them do not.

The engine says nothing of when it reads an adapter, and it may have read it at any time since it began to serve. So the
content on disk counts as the engine's only where it cannot be another one:
- the files have not changed since the engine began, or
- the request loads the adapter in place, so that it is read again at each step, and they have not changed meanwhile.
The first says something only of files that lay there when the adapter was first asked for: a directory above them may
be exchanged later and leave no trace in their times. And an engine finds the weights that it has by number alone, so
where a number goes from one name or path to another nobody knows whose they are, until one is loaded in place.
Whatever else is in doubt: such a request finds nothing and leaves nothing. What was copied out of an engine becomes
visible only after a last look, which says that the files are still as they were read.

Files are read and looked at by two threads; nobody waits for them longer than `LOOK_S`.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybridkv.connectors.vllm.common.identity.background import Background, Outcome
from hybridkv.connectors.vllm.common.identity.files import Content, NotReadableError, Signature, content, signature
from hybridkv.hashing import ChunkKeys

logger = logging.getLogger("vllm.hybridkv.adapters")

MAX_ADAPTERS = 1024
"""Adapters that are remembered; one that nobody asked for longest is read again when it comes back."""
MAX_SEEN = 8192
"""Adapters whose first look is remembered, and numbers; those that come later are in doubt."""
LOOK_S = 0.05
"""How long a request waits for a look at files, none of which is read for it."""
TICK_NS = 100_000_000
"""Changes of a file that lie closer together than this may bear one time."""

Name = tuple[str, int, str]
"""What an engine tells adapters apart by: name, number and path."""


@dataclass(frozen=True, slots=True)
class Sworn:
    """That a request's adapter held this content when it was admitted; `Adapters.holds` says whether it still does."""

    name: Name
    signature: Signature
    keys: ChunkKeys
    is_in_place: bool
    turn: int
    """Of the adapter's number, see `_Turn`."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """Whose a number is, and how often it went from one adapter to another."""

    name: Name
    count: int


@dataclass(slots=True)
class _Adapter:
    """One adapter. `held` is the signature under which the engine is known to have read it.

    It has it still while its number is in the same turn as then.
    """

    name: Name
    options: object
    content: Content | None = None
    reading: Outcome[Content] | None = None
    read_ns: int = 0
    held: Signature | None = None
    held_turn: int = 0
    keys: ChunkKeys | None = None
    complained: str = ""


class Adapters:
    """Keys of the chunks that an adapter has had a part in.

    Args:
        keys: of the model without any.
        began_ns: when the engine began to serve, or earlier, in nanoseconds since 1970.
        now_ns: what time it is, on the same clock.
    """

    def __init__(self, keys: ChunkKeys, began_ns: int, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._keys = keys
        self._nonce = b""
        self._began_ns = began_ns
        self._now_ns = now_ns
        self._adapters: OrderedDict[Name, _Adapter] = OrderedDict()
        self._first_looks: dict[Name, Outcome[Signature]] = {}
        self._turns: dict[int, _Turn] = {}
        self._reader = Background("hybridkv-adapter-reader")
        self._looker = Background("hybridkv-adapter-looker")
        self._looking: Outcome[Signature] | None = None

    def notice(self, lora: Any) -> None:
        """A request with this adapter will come: its files are looked at and read, unless they have been."""
        adapter = self._adapter(lora)
        if adapter.content is None:
            self._read(adapter)

    def swear(self, lora: Any, is_alone: bool) -> Sworn | None:
        """The keys of a request that is about to be admitted, None where the adapter's content is in doubt.

        Args:
            lora: the request's adapter.
            is_alone: no other request keeps the engine from loading the adapter in place.
        """
        adapter = self._adapter(lora)
        if not self._is_read(adapter):
            return None
        found = adapter.content
        assert found is not None
        now = self._look(adapter)
        if now is None or self._turn(adapter) < 0:
            return None
        if now != found.signature:
            self._forget(adapter)
            return None
        if not self._is_held(adapter, found.signature, lora.load_inplace, is_alone):
            return None
        if adapter.keys is None:
            adapter.keys = self._keys.for_adapter(self._nonce + found.digest)
        return Sworn(adapter.name, found.signature, adapter.keys, lora.load_inplace, self._turn(adapter))

    def begin_anew(self, nonce: bytes) -> None:
        """The model is no longer what it was: every adapter gets keys that no other process has.

        Args:
            nonce: what is in all of them from now on.
        """
        self._nonce = nonce
        for adapter in self._adapters.values():
            adapter.keys = None

    def holds(self, sworn: Sworn | None) -> bool:
        """Whether the files are still as they were, so that what was computed since then was computed with them.

        Of a request without an adapter there is nothing to doubt.
        """
        if sworn is None:
            return True
        if not self.is_unchanged(sworn):
            return False
        if sworn.is_in_place:
            # It has run, so the engine has read it.
            adapter = self._adapters[sworn.name]
            adapter.held, adapter.held_turn = sworn.signature, sworn.turn
        return True

    def is_unchanged(self, sworn: Sworn) -> bool:
        """Whether what was sworn would be sworn again, of a request that has not been admitted."""
        adapter = self._adapters.get(sworn.name)
        if adapter is None or self._turn(adapter) != sworn.turn:
            return False
        return self._look(adapter) == sworn.signature

    def settle(self, timeout_s: float) -> bool:
        """Waits until every file that was asked for has been read; for tests and tools."""
        return self._reader.settle(timeout_s) and self._looker.settle(timeout_s)

    def close(self) -> None:
        """Ends the threads, unless a file system keeps them."""
        self._reader.close()
        self._looker.close()

    def _is_held(self, adapter: _Adapter, now: Signature, in_place: bool, is_alone: bool) -> bool:
        """Whether the engine has read, or will read, what the files hold."""
        if in_place:
            # A change within the tick in which they were read would not show.
            is_settled = now.changed_ns + TICK_NS < adapter.read_ns
            if not is_settled:
                self._forget(adapter)
            return is_settled and is_alone
        turn = self._turn(adapter)
        if adapter.held is None and self._first_look(adapter) == now and now.changed_ns + TICK_NS < self._began_ns:
            adapter.held = now
        if adapter.held == now and adapter.held_turn != turn:
            self._complain(
                adapter,
                f"its number {adapter.name[1]} has been another adapter's, and the engine may hold the weights of that "
                "one; load it in place, or give each a number of its own",
            )
            return False
        if adapter.held != now:
            self._complain(
                adapter,
                "its files changed after this engine began, so it may hold other weights than they do; load it in "
                "place, or restart the engine",
            )
            return False
        return True

    def _turn(self, adapter: _Adapter) -> int:
        """The turn of its number; -1 where that is another adapter's, or nobody knows whose."""
        turn = self._turns.get(adapter.name[1])
        return turn.count if turn is not None and turn.name == adapter.name else -1

    def _first_look(self, adapter: _Adapter) -> Signature | None:
        """What lay there when it was first asked for; None where nothing did, or nobody knows."""
        look = self._first_looks.get(adapter.name)
        return look.value if look is not None else None

    def _see(self, name: Name) -> None:
        """Somebody asks for this adapter."""
        turn = self._turns.get(name[1])
        if turn is None and len(self._turns) < MAX_SEEN:
            self._turns[name[1]] = _Turn(name, 0)
        elif turn is not None and turn.name != name:
            self._turns[name[1]] = _Turn(name, turn.count + 1)
        if name not in self._first_looks and len(self._first_looks) < MAX_SEEN:
            # Nobody waits for it: it is done before any look that comes later.
            look = self._looker.submit(lambda: signature(name[2]))
            self._first_looks[name] = look if look is not None else Outcome()

    def _adapter(self, lora: Any) -> _Adapter:
        name = (lora.lora_name, lora.lora_int_id, lora.lora_path)
        self._see(name)
        adapter = self._adapters.get(name)
        if adapter is None:
            adapter = self._adapters[name] = _Adapter(name, _options(lora))
            if len(self._adapters) > MAX_ADAPTERS:
                self._adapters.popitem(last=False)
        self._adapters.move_to_end(name)
        return adapter

    def _is_read(self, adapter: _Adapter) -> bool:
        """Whether the content is known; it is asked for where it is not."""
        if adapter.content is not None:
            return True
        reading = adapter.reading
        if reading is None or not reading.is_done:
            self._read(adapter)
            return False
        adapter.reading = None
        if reading.error is not None:
            self._complain(adapter, str(reading.error))
            self._read(adapter)
            return False
        adapter.content = reading.value
        return True

    def _read(self, adapter: _Adapter) -> None:
        if adapter.reading is None:
            path, options = adapter.name[2], adapter.options
            adapter.read_ns = self._now_ns()
            adapter.reading = self._reader.submit(lambda: content(path, options))

    def _forget(self, adapter: _Adapter) -> None:
        adapter.content = adapter.keys = None
        self._read(adapter)

    def _look(self, adapter: _Adapter) -> Signature | None:
        """The files' signature now; None where it cannot be had, or not at once."""
        path, looking = adapter.name[2], None
        # Behind a look that a file system keeps, no other would come in time.
        if self._looking is None or self._looking.is_done:
            looking = self._looking = self._looker.submit(lambda: signature(path))
        if looking is None or not looking.wait(LOOK_S):
            self._complain(adapter, f"its files could not be looked at within {LOOK_S:g} s")
            return None
        if isinstance(looking.error, NotReadableError):
            self._complain(adapter, str(looking.error))
        return looking.value

    def _complain(self, adapter: _Adapter, why: str) -> None:
        if adapter.complained != why:
            adapter.complained = why
            logger.warning("adapter %s (%s) is neither stored nor restored: %s", adapter.name[0], adapter.name[2], why)


def _options(lora: Any) -> dict[str, Any]:
    """Every field of a LoRARequest but those that name it or say when it is loaded."""
    known = ("lora_name", "lora_int_id", "lora_path", "base_model_name", "load_inplace")
    return {name: getattr(lora, name) for name in lora.__struct_fields__ if name not in known}
