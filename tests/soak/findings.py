"""What a soak says when it found something."""

from __future__ import annotations


class SoakError(Exception):
    """Something that may not be. `kind` is one word or two; a negative control expects one."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.world = 0
        """The number of the world in which it was found."""
