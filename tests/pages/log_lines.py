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
    """Calls of a logger at WARNING or above with a text of more than placeholders. A call of a variable counts if the
    variable has a logger's method of this level as one of its values."""
    nodes = list(ast.walk(ast.parse(source)))
    variables = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and any(_is_log_method(each) for each in ast.walk(node.value))
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in nodes:
        match node:
            case ast.Call(func=called, args=[first, *_]):
                is_log = _is_log_method(called) or (isinstance(called, ast.Name) and called.id in variables)
                text = _text(first) if is_log else None
                if text is not None and re.search(r"\w{3}", text):
                    yield LogLine(text, node.lineno)


def _is_log_method(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in _LEVELS and "logger" in ast.unparse(node.value)


def _text(node: ast.AST) -> str | None:
    match node:
        case ast.Constant(value=str(text)):
            return _VALUE.sub(GAP, text)
        case ast.JoinedStr(values=pieces):
            return "".join(str(piece.value) if isinstance(piece, ast.Constant) else GAP for piece in pieces)
    return None
