"""Exceptions for errors of operators and callers, and `Incompatibility`. A peer's failures are return values."""

import msgspec


class PeersError(Exception):
    """Base class of the exceptions of `hybridkv.peers`."""


class PeersProtocolError(PeersError, RuntimeError):
    """The caller violated the contract of a transport or a link: a bug, not a network failure."""


class PeersConfigurationError(PeersError, ValueError):
    """Invalid value in the operator's configuration.

    `field` is the parameter, `expected` describes valid values, `got` is the value, `hint` suggests a fix.
    """

    def __init__(self, field: str, expected: str, got: object, hint: str = "") -> None:
        self.field = field
        self.expected = expected
        self.got = got
        self.hint = hint
        text = f"{field}: expected {expected}, got {got!r}"
        super().__init__(f"{text}\nhint: {hint}" if hint else text)


class Incompatibility(msgspec.Struct, frozen=True):
    """First incompatible field of two sides, which therefore cannot exchange KV. Returned, not raised.

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
