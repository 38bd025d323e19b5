"""Checks that the links of a page lead to existing pages and headings. Links to other hosts are not checked."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping

_LINK = re.compile(r"\]\(\s*([^()\s]+)\s*\)")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
_FENCE = re.compile(r"^ *```.*?^ *``` *$", re.MULTILINE | re.DOTALL)


def dead_links(page: str, pages: Mapping[str, str], paths: frozenset[str]) -> Iterator[str]:
    """Every relative link of a page that leads nowhere.

    Args:
        page: its path from the root.
        pages: the text of every page, by path.
        paths: every file and folder of the tree.
    """
    for link in _LINK.findall(_FENCE.sub("", pages[page])):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, heading = link.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target)) if target else page
        if path not in paths or (heading and path in pages and heading not in set(_anchors(pages[path]))):
            yield link


def _anchors(page: str) -> Iterator[str]:
    """The anchor of each heading: lower case, no punctuation, hyphens for spaces."""
    for heading in _HEADING.findall(_FENCE.sub("", page)):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
