"""Copies Python files without comments and docstrings. Line numbers do not change.

Arguments: pairs of a file and its copy.
"""

import ast
import io
import pathlib
import sys
import tokenize


def code_only(source: str) -> str:
    """The same program. Of comments and docstrings only the line breaks stay."""
    lines = source.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip()
    rows = [line.encode() for line in lines]  # the parser counts columns in bytes
    tree = ast.parse(source)
    for node in ast.walk(tree):
        constant = getattr(node, "value", None) if isinstance(node, ast.Expr) else None
        if not isinstance(constant, ast.Constant) or not isinstance(constant.value, str):
            continue
        first, last = node.lineno - 1, node.end_lineno - 1
        # Nothing replaces the docstring of the module, since imports from __future__ come first.
        left = b"" if node is tree.body[0] else b"..."
        before, after = rows[first][: node.col_offset], rows[last][node.end_col_offset :]
        rows[first : last + 1] = [before + left, *[b""] * (last - first)]
        rows[last] += after
    return "\n".join(row.decode() for row in rows)


def main(*paths: str) -> None:
    for source, copy in zip(paths[::2], paths[1::2], strict=True):
        pathlib.Path(copy).write_text(code_only(pathlib.Path(source).read_text()))


if __name__ == "__main__":
    main(*sys.argv[1:])
