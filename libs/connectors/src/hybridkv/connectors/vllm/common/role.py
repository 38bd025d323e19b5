"""Role of a connector from `kv_role`: store, load, or both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Role:
    """Role of a connector.

    Args:
        loads: the connector looks up, promotes and loads chunks.
        stores: the connector stores chunks that the engine computes.
        copies_locally: a load may copy from blocks that the engine still holds, in place of a tier.
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
    """Role for `kv_role` of vLLM's KVTransferConfig: a producer only stores, a consumer only loads."""
    match getattr(transfer, "kv_role", None):
        case "kv_producer":
            return Role(loads=False)
        case "kv_consumer":
            return Role(stores=False)
        case _:
            return BOTH
