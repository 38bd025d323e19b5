"""Texts of log calls and of other string literals, with `…` for each value."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

GAP = "\u2026"
_LEVELS = {"warning", "error", "exception", "critical"}
_VALUE = re.compile(r"%[-.\d]*[a-zA-Z]")


class LogLine(NamedTuple):
    text: str
    """The text with `…` for each placeholder."""
    line: int


def literals(source: str) -> Iterator[str]:
    """Every string literal of a module."""
    for node in ast.walk(ast.parse(source)):
        if (text := _text(node)) is not None:
            yield text


def log_lines(source: str) -> Iterator[LogLine]:
    """Calls of a logger at WARNING or above whose text is more than placeholders."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=logger, attr=level), args=[first, *_]) if level in _LEVELS:
                text = _text(first)
                if "logger" in ast.unparse(logger) and text is not None and re.search(r"\w{3}", text):
                    yield LogLine(text, node.lineno)


def _text(node: ast.AST) -> str | None:
    match node:
        case ast.Constant(value=str(text)):
            return _VALUE.sub(GAP, text)
        case ast.JoinedStr(values=pieces):
            return "".join(str(piece.value) if isinstance(piece, ast.Constant) else GAP for piece in pieces)
    return None
