"""What `kv_role` leaves to a connector: to store, to load, or both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Duties:
    """What a connector does. At least one of both.

    Args:
        loads: it is searched, promotes and loads.
        stores: it stores what the engine computes.
        copies_locally: of what it loads, what the engine holds itself is copied there.
    """

    loads: bool = True
    stores: bool = True
    copies_locally: bool = True

    def words(self) -> str:
        """For the start line."""
        if self.loads and self.stores:
            return "stores and loads"
        return "loads only" if self.loads else "stores only"


BOTH: Final = Duties()


def duties_of(transfer: Any) -> Duties:
    """The duties that vLLM's KVTransferConfig names. Without a role it does both."""
    match getattr(transfer, "kv_role", None):
        case "kv_producer":
            return Duties(loads=False)
        case "kv_consumer":
            return Duties(stores=False)
        case _:
            return BOTH
