"""Copies of Python files lack comments and docstrings, and nothing else."""

from __future__ import annotations

import ast

from code_only import code_only

SOURCE = '''"""Of the module,
in two lines."""

from __future__ import annotations  # a comment

TEXT = """kept   
# kept"""  # gone
NUMBER = 3
"""Of the number."""


class Empty:
    """Of the class."""


def função(ü: str = "ä # kept") -> int:  # gone
    """Of the function.

    In lines.
    """
    return len(ü) + 1 / 0
'''  # noqa: W291


def test_comments_and_docstrings_are_gone() -> None:
    copy = code_only(SOURCE)
    assert "Of the" not in copy and "gone" not in copy and "a comment" not in copy


def test_strings_of_the_program_stay() -> None:
    names: dict[str, object] = {}
    exec(code_only(SOURCE), names)
    assert names["TEXT"] == "kept   \n# kept" and names["NUMBER"] == 3


def test_each_statement_keeps_its_line() -> None:
    def places(source: str) -> list[tuple[str, int]]:
        statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
        return [(type(node).__name__, node.lineno) for node in statements]

    kept = [place for place in places(SOURCE) if place[0] != "Expr"]
    assert kept == [place for place in places(code_only(SOURCE)) if place[0] != "Expr"]


def test_another_text_in_a_docstring_makes_no_other_copy() -> None:
    assert code_only(SOURCE) == code_only(SOURCE.replace("Of the function.", "Another."))
    assert code_only(SOURCE) != code_only(SOURCE.replace("+ 1", "+ 2"))
