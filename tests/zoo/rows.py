"""The results of one run for each family, as the page shows them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Row:
    """A family's row. The tests fill it in as their claims come true; a claim that fails leaves it incomplete.

    Attributes:
        groups: what the engine's groups are.
        chunk_tokens: of the connector.
        restored: tokens that came back, and tokens of the prompt, for each prompt.
        next_turn: the same for a prompt that goes on from an answer.
        at_once: the same for each of the requests that ran together.
        controls: the parts of stored pages, each of which changed log-probabilities when it was zeroed.
        refusal: why the engine did not start.
    """

    groups: str = ""
    chunk_tokens: int = 0
    restored: list[tuple[int, int]] = field(default_factory=list)
    next_turn: tuple[int, int] | None = None
    at_once: list[tuple[int, int]] = field(default_factory=list)
    controls: list[str] = field(default_factory=list)
    refusal: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether every claim about the family was tested and held."""
        return bool(self.refusal or (self.restored and self.next_turn and self.at_once and self.controls))


def write_rows(rows: Mapping[str, Row], path: Path) -> None:
    """Writes the complete rows as JSON, for `page`."""
    complete = {name: dataclasses.asdict(row) for name, row in rows.items() if row.is_complete}
    path.write_text(json.dumps(complete, indent=2) + "\n", encoding="utf-8")


def read_rows(path: Path) -> dict[str, Row]:
    """Reads the rows that `write_rows` wrote."""
    return {name: Row(**row) for name, row in json.loads(path.read_text(encoding="utf-8")).items()}
