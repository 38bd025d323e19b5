"""Reason why two sides cannot exchange KV. A value, not an exception: its cause is input from another process."""

from __future__ import annotations

import msgspec


class Incompatibility(msgspec.Struct, frozen=True):
    """First incompatible field.

    Args:
        field: path of the field in a description or a request.
        ours: value on this side.
        theirs: value on the other side.
        hint: advice for the operator.
    """

    field: str
    ours: str
    theirs: str
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.field}: ours is {self.ours}, theirs is {self.theirs}"
        return f"{text}\nhint: {self.hint}" if self.hint else text
