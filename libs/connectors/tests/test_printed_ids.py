"""Request ids in log lines: they are text of a client, and must not forge other lines."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import hybridkv.connectors.vllm as connectors
from hybridkv.connectors.errors import MAX_PRINTED, printable

SOURCES = sorted(Path(connectors.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize(
    ("said", "printed"),
    [("req-1", "req-1"), ("a\nWARNING b", "a?WARNING b"), ("\x1b[31m\u2028", "?[31m?"), (b"x", "b'x'"), ("é", "é")],
)
def test_a_text_of_a_client_stays_on_its_line(said: object, printed: str) -> None:
    assert printable(said) == printed


def test_a_long_text_of_a_client_is_shortened() -> None:
    assert printable("x" * 1000) == "x" * MAX_PRINTED


def raw_ids(source: str) -> Iterator[int]:
    """Lines of log calls that print a request id as it is."""
    for call in ast.walk(ast.parse(source)):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            continue
        if not (isinstance(call.func.value, ast.Name) and call.func.value.id == "logger"):
            continue
        for argument in call.args[1:]:
            name = argument.attr if isinstance(argument, ast.Attribute) else getattr(argument, "id", "")
            if name == "request_id":
                yield call.lineno


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_no_log_line_prints_a_request_id_as_it_is(path: Path) -> None:
    assert list(raw_ids(path.read_text())) == []


def test_a_raw_request_id_is_found() -> None:
    assert list(raw_ids('logger.error("%s", 1)\nlogger.error("%s", each.request_id)')) == [2]
