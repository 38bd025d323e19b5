"""Role of a connector from `kv_role`: store, load, or both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Role:
    """Role of a connector. It loads or stores, or both.

    Args:
        loads: it looks up, promotes and loads chunks.
        stores: it stores chunks that the engine computes.
        copies_locally: loads copy blocks that the engine still holds from GPU memory in place of a tier.
    """

    loads: bool = True
    stores: bool = True
    copies_locally: bool = True

    def words(self) -> str:
        """Text for the startup log."""
        if self.loads and self.stores:
            return "stores and loads"
        return "loads only" if self.loads else "stores only"


BOTH: Final = Role()


def role_of(transfer: Any) -> Role:
    """Role that vLLM's KVTransferConfig names; both without one."""
    match getattr(transfer, "kv_role", None):
        case "kv_producer":
            return Role(loads=False)
        case "kv_consumer":
            return Role(stores=False)
        case _:
            return BOTH
