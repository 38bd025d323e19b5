"""Every name in backticks, every metric with its labels, and every link exists."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from hybridkv.metrics import CATALOGUE
from pages.foreign import FOREIGN
from pages.judge import Judge
from pages.links import dead_links
from pages.spans import code_spans, fenced, figures
from pages.tree import Tree, pages, read_tree

ROOT = Path(__file__).absolute().parents[2]
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in pages(ROOT)}


@cache
def tree() -> Tree:
    return read_tree(ROOT)


def complaints(text: str) -> list[str]:
    """Names on a page that do not exist, each with its line."""
    judge = Judge(tree(), CATALOGUE)
    found = [f"{span.line}: {span.text}: {text}" for span in code_spans(text) for text in judge.complaints(span.text)]
    found += [f"{line}: {text}" for line, piece in figures(text) for text in judge.complaints(piece)]
    found += [f"{line}: {text}" for line, piece in fenced(text) for text in judge.metric_complaints(piece)]
    return found


def test_pages_and_tree_are_not_empty() -> None:
    assert {"README.md", "ARCHITECTURE.md", "docs/reference/configuration.md", "libs/tiers/CONTRACT.md"} <= set(PAGES)
    assert {"TierIndex", "VllmConfig", "test_there_are_pages"} & tree().words == {"TierIndex", "VllmConfig"}


@pytest.mark.parametrize("page", PAGES)
def test_each_name_on_a_page_exists(page: str) -> None:
    assert complaints(PAGES[page]) == []


@pytest.mark.parametrize("page", PAGES)
def test_each_link_of_a_page_leads_somewhere(page: str) -> None:
    assert list(dead_links(page, PAGES, tree().paths)) == []


@pytest.mark.parametrize("page", PAGES)
def test_pages_have_no_merge_markers(page: str) -> None:
    marks = [line for line in PAGES[page].splitlines() if line.startswith(("<<<<<<<", ">>>>>>>", "======="))]
    assert marks == []


def test_no_foreign_name_is_unused() -> None:
    text = "\n".join(PAGES.values())
    assert [name for name in sorted(FOREIGN) if name not in text] == [], "no page has it any more: delete the entry"
    known = tree().words | tree().texts | tree().flags | tree().metrics
    assert sorted(FOREIGN & known) == [], "our own code has it now: delete the entry"


@pytest.mark.parametrize(
    "wrong",
    [
        "`evictt`",
        "`RamIndex.evictt`",
        "`RamIndexx.reserve`",
        "`RamIndex.reserve` and `RamIndex.no_such_verb`",
        "`planner.longest_hitt`",
        "`hybridkv.planner.nowhere`",
        "`_arena_sizee`",
        "`longest_hitt(..., ranges=...)`",
        "`longest_hit(..., rangess=...)`",
        "`libs/tiers/nowhere.py`",
        "`nowhere.md`",
        "`libs/.../nowhere.py`",
        "`libs/nowhere/`",
        "`tests/golden/nothing_v2_*.bin`",
        "`//tools/lint:nothing_test`",
        "`//libs/nowhere/...`",
        "`--no-such-option`",
        "`tools/bazel run //tests/soak -- --no-such-option 60`",
        "`tiers[i].capacityy`",
        "`\u2026.tierss[0].capacity`",
        "`without_prefix_cachingg: true`",
        "`HYBRIDKV_NOTHING=1`",
        '`reason="nothing"`',
        "`vllm:hybridkv_nothing_total`",
        '`vllm:hybridkv_lookups_total{limiting_kind="recurrent"}`',
        "`hybridkv_lookups_total{limiting_kind}`",
        '`vllm:hybridkv_lookups_total{result="nothing"}`',
        "`rate(vllm:hybridkv_nothing_total)`",
        "`_nothing_total`",
        "the first line of\n`two that has no_such_name in it`",
        "``no_such_name``",
        '```\nrate(vllm:hybridkv_lookups_total{limiting_kind="x"}[5m])\n```',
        "```text\n| NoSuchClass decides |\n```",
    ],
)
def test_a_wrong_name_is_found(wrong: str) -> None:
    assert len(complaints(f"# A page\n\nIt says {wrong}.\n" if wrong[:3] != "```" else wrong)) == 1


@pytest.mark.parametrize(
    "right",
    [
        "`RamIndex.reserve`",
        "`planner.longest_hit`",
        "`libs/tiers/`",
        "`contract.py`",
        "`BUILD.bazel`",
        "`//tools/lint`",
        "`--config=full`",
        '`vllm:hybridkv_lookups_total{result="miss"}`',
        "`vllm:hybridkv_load_seconds_bucket`",
        '`reason="checksum"`',
        "`_store_failures_total`",
        "`what is in prose is left alone`",
        "```\nno_such_name\n```",
    ],
)
def test_a_right_name_passes(right: str) -> None:
    assert complaints(f"It says {right}.\n" if right[:3] != "```" else right) == []


def test_a_dead_link_is_found() -> None:
    texts = {"docs/a.md": "[b](b.md#one) [c](b.md#two) [d](c.md) [e](#here)\n", "docs/b.md": "# One\n"}
    assert list(dead_links("docs/a.md", texts, frozenset(texts))) == ["b.md#two", "c.md", "#here"]
