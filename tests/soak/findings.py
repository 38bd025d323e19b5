"""The error that a soak raises for a finding."""

from __future__ import annotations


class SoakError(Exception):
    """A violated property. `kind` is one or two words; each negative control expects one kind."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.world = 0
        """Number of the world in which it was found."""
