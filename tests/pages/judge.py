"""Checks that the names in a code span exist in the tree.

A span of one word, of a path, of a call or of a dotted name is checked as a whole. In a span of several words, a log
line or a command, only parts that cannot be prose are checked: options, labels of Bazel, files, metrics, and names with
an underscore or a capital in the middle.

Limit: a name that exists elsewhere passes. `evict` passes on any page as long as the code has some `evict`; for a class
(`RamIndex.reserve`) or a package (`planner.longest_hit`) the member must exist.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

from hybridkv.metrics import Catalogue, Label, Metric
from pages.foreign import FOREIGN
from pages.tree import Tree

_OURS = r"vllm:(?:hybridkv|kv_connector_mc)_"
_ATOMS = re.compile(
    r"""
    (?P<metric>(?:[a-z_]+:)?[a-z_]+\{[^}/]*\}|vllm:[a-z_]+)
    |(?P<label>(?:@\w+|(?<![:\w]))//[\w./-]*(?::[\w.<>/-]+)?)
    |(?P<path>[\w.<>*~$-]*(?:/[\w.<>*{},…-]*)+|[\w*.-]+\.(?:py|pyi|md|json|yml|toml|h|cc|cu|inc|bzl|bazel|bin|txt|in|sh)\b)
    |(?P<flag>(?<![\w-])--?[a-z][\w-]*)
    |(?P<name>(?<!\w)[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)
    """,
    re.VERBOSE,
)
_MATCHER = re.compile(r"(\w+)\s*(=~|!=|!~|=)?\s*(?:\"([^\"]*)\")?")
_PLACEHOLDER = re.compile(r"<\w+>|\.\.\.|…")
_HISTOGRAM = re.compile(r"_(?:bucket|sum|count)$")
_BUILTINS = frozenset(dir(builtins)) | set(keyword.kwlist) | {"true", "false", "null"}
_ENGINE_LABELS = ("engine", "model_name")
"""Labels that vLLM adds to every series."""


class Judge:
    """Checks spans against one tree and one catalogue of metrics."""

    def __init__(self, tree: Tree, catalogue: Catalogue) -> None:
        self._tree = tree
        self._metrics = {metric.name: metric for metric in catalogue.metrics}
        self._labels: dict[str, set[str] | None] = {}
        for label in (label for metric in catalogue.metrics for label in metric.labels):
            values = set(label.values) if isinstance(label, Label) else None
            known = self._labels.setdefault(label.name, values)
            if known is not None and values is not None:
                known.update(values)

    def complaints(self, span: str) -> list[str]:
        """A message for each name of a code span that does not exist."""
        if span in FOREIGN or (re.search("[ -]", span) and span in self._tree.texts):
            return []
        if (pair := re.fullmatch(r'(\w+)="(\w+)"', span)) and pair[1] in self._labels:
            return list(self._label_complaints(pair[1], pair[2], self._labels[pair[1]]))
        prose = " " in re.sub(r"\([^()]*\)|: ?\"?\w*\"?$| = \[.*\]$", "", span)
        return [text for atom in _ATOMS.finditer(span) for text in self._of_atom(atom, prose)]

    def metric_complaints(self, line: str) -> list[str]:
        """A message for each metric of ours in any line that does not exist."""
        found = (atom["metric"] for atom in _ATOMS.finditer(line) if atom["metric"])
        return [text for metric in found if re.match(_OURS, metric) for text in self._of_metric(metric)]

    def _of_atom(self, atom: re.Match[str], prose: bool) -> Iterator[str]:
        kind, text = str(atom.lastgroup), atom[0]
        if text in FOREIGN:
            return
        if kind == "metric":
            yield from self._of_metric(text)
        elif kind == "label":
            if not self._has_label(text):
                yield f"no target {text}"
        elif kind == "path":
            if text not in self._tree.texts and not self._has_path(text):
                yield f"no file {text}"
        elif kind == "flag":
            if not self._has_flag(text):
                yield f"no option {text}"
        elif not prose or re.search(r"[^_]_[^_]|[a-z][A-Z]", text):
            yield from self._of_name(text)

    def _of_name(self, text: str) -> Iterator[str]:
        head, *rest = text.split(".")
        if rest and head in self._tree.classes:
            if rest[0] not in self._tree.classes[head]:
                yield f"{head} has no {rest[0]}"
            return
        if rest and (found := self._in_a_package(text)) is not None:
            if not found:
                yield f"no {text}"
            return
        if text in self._tree.texts or (rest and "*." + ".".join(rest) in self._tree.templates):
            return
        for part in (head, *rest):
            if not self._has_word(part):
                yield f"no {part}"

    def _in_a_package(self, text: str) -> bool | None:
        """Whether a dotted name can be imported. None if its first part is not a package of ours."""
        parts = text.split(".")
        prefix = "" if parts[0] == "hybridkv" else "hybridkv."
        for end in range(len(parts), 0, -1):
            module = prefix + ".".join(parts[:end])
            if module in self._tree.modules:
                rest = parts[end:]
                known = not rest or rest[0] in self._tree.modules[module]
                if known and len(rest) > 1 and rest[0] in self._tree.classes:
                    return rest[1] in self._tree.classes[rest[0]]
                return known
        return None

    def _has_word(self, word: str) -> bool:
        if len(word) == 1 or word in _BUILTINS or word in FOREIGN:
            return True
        if word in self._tree.words or word in self._tree.texts:
            return True
        return word.startswith("_") and any(name.endswith(word) for name in self._metrics)

    def _has_flag(self, flag: str) -> bool:
        return len(flag) == 2 or flag in self._tree.flags

    def _has_path(self, text: str) -> bool:
        """Whether some file or folder ends with this path. Paths outside the tree are accepted."""
        if text.startswith(("/", "~", "$")) or text.strip("/.") == "":
            return True
        pattern = re.escape(_PLACEHOLDER.sub("\0", text.strip("/").removeprefix("./")))
        pattern = pattern.replace("\0", ".*").replace(r"\*", "[^/]*")
        pattern = re.sub(r"\\\{(.*?)\\\}", lambda braces: f"(?:{braces[1].replace(',', '|')})", pattern)
        end = re.compile(rf"(?:.*/)?{pattern}")
        if any(end.fullmatch(path) for path in self._tree.paths):
            return True
        templates = (template for template in self._tree.templates if re.match(r"[\w.-]{4,}\*[^ ]*\.", template))
        return any(fnmatchcase(text, template) for template in templates)

    def _has_label(self, label: str) -> bool:
        repository, _, target = label.rpartition("//")
        if repository:
            return self._has_word(repository.removeprefix("@"))
        package, _, name = target.partition(":")
        if package.endswith("..."):
            return package == "..." or package.removesuffix("/...") in self._tree.paths
        texts = self._tree.targets.get(package)
        if texts is None:
            return False
        made = (name.removesuffix(suffix) for suffix in self._tree.suffixes if name.endswith(suffix))
        return not name or name in texts or not texts.isdisjoint(made) or f"{package}/{name}" in self._tree.paths

    def _of_metric(self, text: str) -> Iterator[str]:
        name, _, inner = text.partition("{")
        found = self._metric(name)
        if found is None:
            if re.match(_OURS, name) or not name.startswith("vllm:"):
                if not any(known.startswith(name) for known in self._metrics if name.endswith("_")):
                    yield f"no metric {name}"
            elif name not in self._tree.metrics and name not in FOREIGN:
                yield f"no metric {name}"
            return
        values = {label.name: label for label in found.labels}
        for label, _, value in _MATCHER.findall(inner.rstrip("}")):
            known = values.get(label)
            if known is not None:
                yield from self._label_complaints(label, value, set(known.values) if isinstance(known, Label) else None)
            elif label not in _ENGINE_LABELS:
                yield f"{found.name} has no label {label}"

    def _metric(self, name: str) -> Metric | None:
        for candidate in (name, _HISTOGRAM.sub("", name)):
            if candidate in self._metrics:
                return self._metrics[candidate]
        if name.startswith("vllm:"):
            return None
        return next((metric for known, metric in self._metrics.items() if known.endswith(name)), None)

    @staticmethod
    def _label_complaints(label: str, value: str, values: set[str] | None) -> Iterator[str]:
        if value and values is not None and value not in values:
            yield f'no series has {label}="{value}"'
