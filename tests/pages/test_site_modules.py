"""Each module that the site documents exists. Otherwise only the full ring's build of the site would fail."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).absolute().parents[2]


def test_the_modules_of_the_site_exist() -> None:
    tree = ast.parse((ROOT / "tools/site/build_site.py").read_text(encoding="utf-8"))
    values = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and any(isinstance(name, ast.Name) and name.id == "API" for name in node.targets)
    ]
    [modules] = map(ast.literal_eval, values)
    assert modules
    for library, names in modules.items():
        for name in names:
            path = ROOT / "libs" / library / "src/hybridkv" / library / name.replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file(), f"{library}.{name}"
