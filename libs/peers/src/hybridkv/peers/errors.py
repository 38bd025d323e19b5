"""Exceptions of this library, for operator errors and caller errors. Failures of a peer are returned as values."""


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
