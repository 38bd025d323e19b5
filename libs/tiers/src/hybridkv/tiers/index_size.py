"""What an index of many keys may take, in words for an operator."""

from __future__ import annotations

from typing import Protocol


class SizedIndex(Protocol):
    """An index or a table that is in one of two languages."""

    @property
    def is_native(self) -> bool: ...

    @property
    def max_keys(self) -> int: ...

    @property
    def most_index_bytes(self) -> int: ...


def in_words(index: SizedIndex, why_not_native: str) -> str:
    """In which language it is, why not in the other, and what it may take."""
    language = "C++" if index.is_native else f"Python{why_not_native}"
    return f"index of {index.max_keys} records takes up to {index.most_index_bytes / (1 << 20):.1f} MiB, in {language}"
