"""What `hybridkv.metrics` raises."""


class MetricsError(ValueError):
    """A name, label or value that the catalogue does not allow. Says where, what was expected and what was found."""

    def __init__(self, path: str, expected: str, got: object) -> None:
        self.path = path
        self.expected = expected
        self.got = got
        super().__init__(f"{path}: expected {expected}, got {got!r}")
