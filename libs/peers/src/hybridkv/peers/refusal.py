"""Why two sides cannot exchange something: a value, because it comes of what another process said."""

from __future__ import annotations

import msgspec


class Refusal(msgspec.Struct, frozen=True):
    """The first thing that is in the way.

    Args:
        field: of a description or of a request, as a path.
        ours: its value on this side.
        theirs: its value on the other.
        hint: what an operator can do.
    """

    field: str
    ours: str
    theirs: str
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.field}: ours is {self.ours}, theirs is {self.theirs}"
        return f"{text}\nhint: {self.hint}" if self.hint else text
