"""The page of log lines quotes the log texts of the code, and lists every log line of the connectors."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from pages.log_lines import GAP, literals, log_lines
from pages.spans import code_spans

ROOT = Path(__file__).absolute().parents[2]
PAGE = ROOT / "docs/guides/troubleshooting.md"
OWN_LIST = "libs/tiers/src/hybridkv/tiers/disk/"
"""docs/guides/disk.md lists the log lines of these modules."""
FEWEST = 12
"""The smallest number of letters of a quote that identifies one line."""


@cache
def sources() -> dict[str, str]:
    found = sorted(ROOT.glob("libs/*/src/**/*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in found}


@cache
def texts() -> frozenset[str]:
    return frozenset(text for source in sources().values() for text in literals(source))


def quotes() -> list[str]:
    """Code spans in the first cells of the tables."""
    rows = re.findall(r"^\| (`.*?) \| ", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [span.text for row in rows for span in code_spans(row)]


def is_beginning(quote: str, text: str) -> bool:
    return text.startswith((quote, quote.removesuffix(GAP)))


@pytest.mark.parametrize("quote", quotes())
def test_the_code_has_each_line_that_the_page_quotes(quote: str) -> None:
    assert any(is_beginning(quote, text) for text in texts())


def test_the_page_lists_all_log_lines_of_connectors_and_libraries() -> None:
    own = [quote for quote in quotes() if len(re.findall(r"\w", quote)) >= FEWEST]
    short = set(quotes()) - set(own)
    missing = [
        f"{name}:{found.line}: {found.text}"
        for name, source in sources().items()
        if not name.startswith((OWN_LIST, "libs/tiers/src/hybridkv/tiers/files/"))
        for found in log_lines(source)
        if found.text not in short and not any(is_beginning(quote, found.text) for quote in own)
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("logger.warning('load %s of %d', x, y)", ["load \u2026 of \u2026"]),
        ("self._logger.error(f'{x} is down')", ["\u2026 is down"]),
        ("logger.info('a line')", []),
        ("logger.warning('%s', text)", []),
        ("warnings.warning('a line')", []),
        ("log = logger.debug if again else logger.warning\nlog('a line')", ["a line"]),
        ("log = logger.debug\nlog('a line')", []),
    ],
)
def test_log_lines_are_found(source: str, found: list[str]) -> None:
    """Control for the checks above."""
    assert [line.text for line in log_lines(source)] == found


def test_a_quote_of_another_text_does_not_match() -> None:
    """Control for the checks above."""
    text = "request \u2026 cannot load \u2026 tokens: \u2026"
    assert is_beginning("request \u2026 cannot load \u2026 tokens: \u2026", text)
    assert is_beginning("request \u2026 cannot load \u2026", text)
    assert not is_beginning("request \u2026 cannot read", text)
