"""What this library raises: the operator's mistakes and the caller's. What a server did comes back as a value."""


class LMCacheError(Exception):
    """Base of everything that `hybridkv.lmcache` raises on purpose."""


class LMCacheProtocolError(LMCacheError, RuntimeError):
    """The caller used something in a way that its contract excludes: a bug, not a broken server."""


class LMCacheConfigurationError(LMCacheError, ValueError):
    """A value from the operator's configuration, or a server's, that cannot work.

    `field` is the parameter, `expected` says what would do, `got` is what was given, `hint` what to try next.
    """

    def __init__(self, field: str, expected: str, got: object, hint: str = "") -> None:
        self.field = field
        self.expected = expected
        self.got = got
        self.hint = hint
        text = f"{field}: expected {expected}, got {got!r}"
        super().__init__(f"{text}\nhint: {hint}" if hint else text)
