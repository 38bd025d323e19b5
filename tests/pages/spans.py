"""The code spans of a Markdown page, and its lines about metrics.

It does not judge them: `judge` does. What stands in a fence is left out: an example is run by the test of its own
library, and a command line or a piece of a log names what no source file has.
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
    """Between the backticks, on one line."""


def code_spans(page: str) -> Iterator[Span]:
    """Every code span outside of fences, with the line on which it begins."""
    text = _FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), page)
    for match in _SPAN.finditer(text):
        yield Span(text.count("\n", 0, match.start()) + 1, " ".join(match[2].split()))


def figures(page: str) -> Iterator[Span]:
    """Lines of the fences with figures. Names in figures are checked too."""
    for fence in _FENCE.finditer(page):
        if fence[0].lstrip().startswith("```text"):
            first = page.count("\n", 0, fence.start()) + 1
            for number, line in enumerate(fence[0].splitlines()[1:-1], 1):
                yield Span(first + number, line)


def fenced(page: str) -> Iterator[Span]:
    """Every line of every fence: a query of a metric is right or wrong there, too."""
    for fence in _FENCE.finditer(page):
        first = page.count("\n", 0, fence.start()) + 1
        for number, line in enumerate(fence[0].splitlines()):
            yield Span(first + number, line)
