"""Exceptions of this library, for operator errors and caller errors. Failures of a server are returned as values."""


class LMCacheError(Exception):
    """Base class of the exceptions of `hybridkv.lmcache`."""


class LMCacheProtocolError(LMCacheError, RuntimeError):
    """The caller violated a contract: a bug, not a server failure."""


class LMCacheConfigurationError(LMCacheError, ValueError):
    """Invalid value in the configuration of the operator or of a server.

    `field` is the parameter, `expected` describes valid values, `got` is the value, `hint` suggests a fix.
    """

    def __init__(self, field: str, expected: str, got: object, hint: str = "") -> None:
        self.field = field
        self.expected = expected
        self.got = got
        self.hint = hint
        text = f"{field}: expected {expected}, got {got!r}"
        super().__init__(f"{text}\nhint: {hint}" if hint else text)
