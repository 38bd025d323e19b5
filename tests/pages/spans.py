"""The code spans of a Markdown page, and its lines about metrics.

`judge` checks them. Fenced code is left out: examples are run by the tests of their library, and command lines or
pieces of a log contain names that no source file has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)(`+)(?!`)((?:(?!\n\s*\n).)+?)(?<!`)\1(?!`)", re.DOTALL)


class Span(NamedTuple):
    line: int
    text: str
    """The text between the backticks, joined into one line."""


def code_spans(page: str) -> Iterator[Span]:
    """Every code span outside fences, with the line on which it begins."""
    text = _FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), page)
    for match in _SPAN.finditer(text):
        yield Span(text.count("\n", 0, match.start()) + 1, " ".join(match[2].split()))


def figures(page: str) -> Iterator[Span]:
    """Lines of ```text fences, which hold figures. Names in figures are checked too."""
    for fence in _FENCE.finditer(page):
        if fence[0].lstrip().startswith("```text"):
            first = page.count("\n", 0, fence.start()) + 1
            for number, line in enumerate(fence[0].splitlines()[1:-1], 1):
                yield Span(first + number, line)


def fenced(page: str) -> Iterator[Span]:
    """Every line of every fence: queries of metrics in fences must be right too."""
    for fence in _FENCE.finditer(page):
        first = page.count("\n", 0, fence.start()) + 1
        for number, line in enumerate(fence[0].splitlines()):
            yield Span(first + number, line)
