"""Builds the site of the documentation from the pages of the tree.

    build_site.py ROOT OUTPUT

The pages keep their paths, so their links do not change. Adds an API page for each library in `API`; mkdocstrings fills
it from the docstrings. Imports none of the libraries.
"""

from __future__ import annotations

import logging
import posixpath
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

CONFIG = "docs/mkdocs.yml"
FIRST_PAGES = ("README.md", "docs/README.md")
STYLE = Path(__file__).with_name("site.css")
API = {
    "canonical": ("",),
    "connectors": ("config", "checking", "errors", "vllm", "vllm.multi.config"),
    "hashing": ("",),
    "lmcache": ("geometry", "keys", "page", "pool"),
    "metrics": ("",),
    "peers": ("cells", "comparison", "description", "digests", "pairing", "errors", "tables"),
    "planner": ("",),
    "tiers": ("",),
    "transfer": ("",),
}
"""Public modules of each library, below its package; "" is the package itself."""

_LINK = re.compile(r"\]\(\s*([^()\s]+)\s*\)")
_ITEM = re.compile(r"[-*] |\d+\. ")
_FENCE = re.compile(r"^ *(```|~~~)")


def build(root: Path, output: Path) -> None:
    """Builds the site.

    Args:
        root: the tree.
        output: the folder; its content is replaced.

    Raises:
        SystemExit: a link leads nowhere, or a page of the navigation does not exist.
    """
    from mkdocs.commands.build import build as build_pages
    from mkdocs.config import load_config
    from mkdocs.exceptions import Abort

    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    with tempfile.TemporaryDirectory() as scratch:
        stage(root, Path(scratch))
        config = load_config(str(Path(scratch) / "mkdocs.yml"), site_dir=str(output.absolute()))
        try:
            build_pages(config)
        except Abort as error:
            raise SystemExit(f"build_site.py: {error}") from None


def stage(root: Path, folder: Path) -> None:
    """Copies the configuration, all pages that can be reached, the files that they link to, and the sources of the
    libraries in `API`. Writes the API pages."""
    config = (root / CONFIG).read_text(encoding="utf-8")
    (folder / "mkdocs.yml").write_text(config, encoding="utf-8")
    pages = folder / "pages"
    listed = set(re.findall(r": (\S+\.md)$", config, re.MULTILINE))
    for name in reachable(root, sorted(listed - {f"api/{library}.md" for library in API}) + list(FIRST_PAGES)):
        target = pages / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".md"):
            target.write_text(for_python_markdown((root / name).read_text(encoding="utf-8")), encoding="utf-8")
        else:
            shutil.copyfile(root / name, target)
    for library, modules in API.items():
        target = pages / f"api/{library}.md"
        target.parent.mkdir(exist_ok=True)
        target.write_text(api_page(library, modules), encoding="utf-8")
        shutil.copytree(
            root / f"libs/{library}/src/hybridkv/{library}",
            folder / f"src/hybridkv/{library}",
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    shutil.copyfile(STYLE, pages / STYLE.name)


def reachable(root: Path, first: list[str]) -> Iterator[str]:
    """The given pages, and all pages and files that are reachable from them by links. SystemExit if a given page does
    not exist."""
    waiting, seen = list(first), set(first)
    while waiting:
        name = waiting.pop()
        if not (root / name).is_file():
            raise SystemExit(f"build_site.py: no file {name}")
        yield name
        if name.endswith(".md"):
            for link in _LINK.findall((root / name).read_text(encoding="utf-8")):
                path = posixpath.normpath(posixpath.join(posixpath.dirname(name), link.partition("#")[0]))
                if not re.match(r"[a-z]+:|#", link) and path not in seen and (root / path).is_file():
                    seen.add(path)
                    waiting.append(path)


def for_python_markdown(text: str) -> str:
    """The page with a blank line before each list, which Python-Markdown needs after a paragraph."""
    lines: list[str] = []
    is_fenced = in_list = False
    for line in text.splitlines():
        is_fenced ^= bool(_FENCE.match(line))
        if not line.strip():
            in_list = False
        elif not is_fenced and _ITEM.match(line):
            if lines and lines[-1].strip() and not in_list:
                lines.append("")
            in_list = True
        lines.append(line)
    return "\n".join(lines) + "\n"


def api_page(library: str, modules: tuple[str, ...]) -> str:
    """Page of the API of one library."""
    package = f"hybridkv.{library}"
    if modules == ("",):
        return f"# {package}\n\n::: {package}\n"
    names = [f"{package}.{module}" for module in modules]
    parts = [f"## {name}\n\n::: {name}\n    options:\n      heading_level: 3\n" for name in names]
    return f"# {package}\n\n" + "\n".join(parts)


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]))
