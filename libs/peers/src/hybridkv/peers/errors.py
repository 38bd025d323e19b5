"""What this library raises: the operator's mistakes and the caller's. What a peer did comes back as a value."""


class PeersError(Exception):
    """Base of everything that `hybridkv.peers` raises on purpose."""


class PeersProtocolError(PeersError, RuntimeError):
    """The caller used a transport or a link in a way that its contract excludes: a bug, not a broken network."""


class PeersConfigurationError(PeersError, ValueError):
    """A value from the operator's configuration that cannot work.

    `field` is the parameter, `expected` says what would do, `got` is what was given, `hint` what to try next.
    """

    def __init__(self, field: str, expected: str, got: object, hint: str = "") -> None:
        self.field = field
        self.expected = expected
        self.got = got
        self.hint = hint
        text = f"{field}: expected {expected}, got {got!r}"
        super().__init__(f"{text}\nhint: {hint}" if hint else text)
