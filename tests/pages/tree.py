"""Contents of the tree: files, names used in code, string literals, members of classes.

Names come from the syntax tree, so comments and docstrings do not count. A name that code only uses counts: mypy has
checked that it exists, or it belongs to the engine. Lock files and measured results contain arbitrary names and are
left out.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

_SYNTAX = {".py", ".pyi", ".bzl", ".bazel"}
_C_PLUS_PLUS = {".cc", ".cu", ".h", ".inc"}
_NOT_READ = {".bin", ".md", ".pyc", ".svg", ".typed"}
_NO_EVIDENCE = re.compile(r"(^|/)(tests/pages/\w+\.py|bench/results/)|lock\.(txt|json)$|^LICENSE$")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_C_STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
_WORD = re.compile(r"[A-Za-z_]\w*")
_FLAG = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
_METRIC = re.compile(r"vllm:[a-z_]+")


@dataclass(slots=True)
class _Class:
    members: set[str] = field(default_factory=set)
    bases: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Tree:
    """Args:
    paths: every file and folder, from the root of the repository.
    words: names that code defines or uses, and what configuration files hold.
    texts: string literals, whole.
    templates: formatted literals, with `*` in place of each value.
    flags: options of command lines that some file names.
    metrics: names of metrics of the engine that some file names.
    targets: string literals of each package's BUILD.bazel, by the package's path.
    suffixes: what macros put behind a name to make another target's.
    classes: members of each class that is defined here, with those of its bases.
    modules: what each module defines or imports, by its dotted name.
    """

    paths: frozenset[str]
    words: frozenset[str]
    texts: frozenset[str]
    templates: frozenset[str]
    flags: frozenset[str]
    metrics: frozenset[str]
    targets: Mapping[str, frozenset[str]]
    suffixes: frozenset[str]
    classes: Mapping[str, frozenset[str]]
    modules: Mapping[str, frozenset[str]]


def read_tree(root: Path) -> Tree:
    files = sorted(_files(root))
    reader = _Reader()
    for name in files:
        if not _NO_EVIDENCE.search(name) and PurePosixPath(name).suffix not in _NOT_READ:
            reader.read(name, (root / name).read_text(encoding="utf-8", errors="replace"))
    folders = {str(parent) for name in files for parent in PurePosixPath(name).parents}
    return reader.tree(frozenset(files) | (folders - {"."}))


def pages(root: Path) -> list[str]:
    """All Markdown pages except changelogs, which may name removed things."""
    return [name for name in sorted(_files(root)) if name.endswith(".md") and not name.endswith("CHANGELOG.md")]


def python_files(root: Path) -> list[str]:
    return [name for name in sorted(_files(root)) if name.endswith(".py")]


def _files(root: Path) -> Iterator[str]:
    """Files that git tracks or would add. Without git, as under Bazel: every file."""
    if (root / ".git").exists():
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        found = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.splitlines()
        yield from (name for name in found if (root / name).is_file())
        return
    for folder, _, names in os.walk(root):
        yield from (Path(folder, name).relative_to(root).as_posix() for name in names)


class _Reader:
    def __init__(self) -> None:
        self._words: set[str] = set()
        self._texts: set[str] = set()
        self._templates: set[str] = set()
        self._flags: set[str] = set()
        self._metrics: set[str] = set()
        self._targets: dict[str, frozenset[str]] = {}
        self._suffixes: set[str] = set()
        self._classes: defaultdict[str, _Class] = defaultdict(_Class)
        self._modules: dict[str, set[str]] = {}

    def read(self, name: str, text: str) -> None:
        self._flags.update(_FLAG.findall(text))
        self._metrics.update(_METRIC.findall(text))
        suffix = PurePosixPath(name).suffix
        if suffix in _SYNTAX:
            self._read_syntax(name, ast.parse(text))
        elif suffix in _C_PLUS_PLUS:
            code = _COMMENT.sub(" ", text)
            self._texts.update(_C_STRING.findall(code))
            self._words.update(_WORD.findall(_C_STRING.sub(" ", code)))
            self._words.update(word for literal in _C_STRING.findall(code) for word in _WORD.findall(literal))
        else:
            self._words.update(_WORD.findall(text))
            self._texts.update(re.findall(r"[^\s\"',;()\[\]{}]+", text))

    def tree(self, paths: frozenset[str]) -> Tree:
        names = {part for path in paths for part in (PurePosixPath(path).name, PurePosixPath(path).stem)}
        return Tree(
            paths,
            frozenset(self._words | names),
            frozenset(self._texts),
            frozenset(self._templates),
            frozenset(self._flags),
            frozenset(self._metrics),
            self._targets,
            frozenset(self._suffixes),
            {name: frozenset(self._members(name, set())) for name in self._classes},
            {name: frozenset(defined) for name, defined in self._modules.items()},
        )

    def _members(self, name: str, seen: set[str]) -> set[str]:
        if name in seen or name not in self._classes:
            return set()
        seen.add(name)
        found = self._classes[name]
        return found.members.union(*(self._members(base, seen) for base in found.bases))

    def _read_syntax(self, name: str, module: ast.Module) -> None:
        nodes = list(ast.walk(module))
        texts = frozenset(_texts(nodes))
        self._texts |= texts
        if PurePosixPath(name).name == "BUILD.bazel":
            self._targets[name.rpartition("/")[0]] = texts
        elif name.endswith(".bzl"):
            self._suffixes.update(text for text in texts if re.fullmatch(r"(_\w+)", text))
        for node in nodes:
            self._words.update(_named(node))
            if isinstance(node, ast.JoinedStr):
                self._templates.add(_template(node))
            elif isinstance(node, ast.ClassDef):
                found = self._classes[node.name]
                found.members.update(_defined(node.body), _attributes(node))
                found.bases.update(base for entry in node.bases if (base := _last_name(entry)) is not None)
        if "/src/hybridkv/" in name:
            dotted = name.split("/src/")[1].removesuffix(".py").removesuffix(".pyi").removesuffix("/__init__")
            self._modules.setdefault(dotted.replace("/", "."), set()).update(_defined(module.body))


def _texts(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """String literals that are not docstrings."""
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        match node:
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                yield text


def _template(node: ast.JoinedStr) -> str:
    return "".join(str(piece.value) if isinstance(piece, ast.Constant) else "*" for piece in node.values)


def _named(node: ast.AST) -> Iterator[str]:
    """Names that one node of the syntax tree defines or uses."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.keyword(arg=str(name)):
            yield name
        case ast.alias(name=name, asname=other):
            yield from name.split(".")
            yield from [other] if other else []
        case ast.ImportFrom(module=str(module)):
            yield from module.split(".")


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    """Names that statements of a module or class define."""
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Assign(targets=targets):
                yield from (node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name for alias in names)
            case ast.If(body=inner, orelse=other):
                yield from _defined(inner + other)
            case ast.Try(body=inner, handlers=handlers):
                yield from _defined(inner + [line for handler in handlers for line in handler.body])


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    for inner in ast.walk(node):
        match inner:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def _last_name(node: ast.expr) -> str | None:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=value):
            return _last_name(value)
    return None
