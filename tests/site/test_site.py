"""The documentation site has no dead links, and a browser shows its pages."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest
from browser import Page, running_browser

ROOT = Path(__file__).absolute().parents[2]
SITE = Path(os.environ["HYBRIDKV_SITE"]).absolute()
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
SHOWN = [
    "",
    "docs/guides/quickstart/",
    "docs/guides/runbook/",
    "docs/reference/configuration/",
    "docs/reference/metrics/",
    "ARCHITECTURE/",
    "api/planner/",
]


class _Server(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Logs nothing."""


class _References(HTMLParser):
    """The links and resources of a page, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value and tag != "base":
                self.links.add(unquote(value))
            elif name == "id" and value:
                self.anchors.add(value)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Server, directory=str(SITE)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with running_browser(Path(os.environ["HYBRIDKV_CHROMIUM"]).absolute(), tmp_path_factory.mktemp("browser")) as found:
        found.resize(1400, 1100)
        yield found


def test_each_link_of_each_page_leads_somewhere() -> None:
    references = {name: _References((SITE / name).read_text(encoding="utf-8")) for name in PAGES}
    dead = []
    for name, found in references.items():
        folder = "" if name == "404.html" else str(Path(name).parent)
        for link in found.links:
            if re.match(r"[a-z]+:|//", link):
                continue
            path, _, anchor = link.partition("#")
            target = os.path.normpath(os.path.join(folder, path.lstrip("/"))) if path else name
            if (SITE / target).is_dir():
                target = os.path.normpath(f"{target}/index.html")
            known = references[target].anchors if target in references else None
            if not (SITE / target).is_file() or (anchor and known is not None and anchor not in known):
                dead.append(f"{name}: {link}")
    assert dead == []


def test_pages_load_nothing_from_other_hosts() -> None:
    pattern = r'<(?:script|link|img|iframe)[^>]*(?:src|href)="?((?:https?:)?//[^"> ]+)'
    assert [
        (name, url) for name in PAGES for url in re.findall(pattern, (SITE / name).read_text(encoding="utf-8"))
    ] == []


def test_each_page_of_docs_is_in_the_navigation() -> None:
    listed = set(re.findall(r": (docs/\S+\.md)$", (ROOT / "docs/mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")} == listed


@pytest.mark.parametrize("shown", SHOWN)
def test_a_browser_shows_the_page(shown: str, address: str, page: Page) -> None:
    page.problems.clear()
    page.open(address + shown)
    assert page.value("document.querySelector('.md-content h1').innerText.length") > 3
    assert page.value("document.querySelectorAll('.md-tabs__item').length") == 7
    assert page.value("[...document.images].every(image => image.complete && image.naturalWidth > 0)") is True
    assert page.value("document.documentElement.scrollWidth <= window.innerWidth") is True
    assert page.problems == []
    if (outputs := os.environ.get("TEST_UNDECLARED_OUTPUTS_DIR")) is not None:
        page.picture(Path(outputs) / f"{shown.strip('/').replace('/', '-') or 'home'}.png")


def test_a_phone_needs_no_horizontal_scrolling(address: str, page: Page) -> None:
    page.resize(390, 844)
    for shown in SHOWN:
        page.open(address + shown)
        assert page.value("document.documentElement.scrollWidth <= window.innerWidth") is True, shown
    page.resize(1400, 1100)


def test_the_search_finds_a_configuration_key(address: str, page: Page) -> None:
    page.open(address)
    page.value("document.querySelector('[data-md-toggle=search]').click()")
    page.value(
        "(field => { field.focus(); field.value = 'lookup_timeout_seconds'; field.dispatchEvent(new Event('keyup')) })"
        "(document.querySelector('.md-search__input'))"
    )
    found = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
    page.wait_for(f"{found}.some(link => link.includes('docs/reference/configuration/'))")


def test_a_missing_picture_is_detected(address: str, page: Page) -> None:
    """Control for `problems`."""
    page.problems.clear()
    page.open(address)
    page.value("new Promise(done => { const image = new Image(); image.onerror = done; image.src = '/no.png' })")
    page.wait_for("true")
    assert any("404" in problem for problem in page.problems)
