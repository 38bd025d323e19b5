"""Looks an engine's KV cache specs up in `spec_table.py`.

Exact classes, and every field: a class or a field that the table lacks is one that a later version brought, and is
refused, the field once it is set away from its default. In this field a wrong hit is silent, so what nobody has looked
at is not tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from hybridkv.connectors.vllm.spec_table import KNOWN, Flag, known_flags

_HOME = "vllm.v1.kv_cache_interface"
_DRAFTS = "non_causal_multi_token_decode"
_WITHOUT = "start without hybridkv: no setting makes this model's prefixes fit to be stored"


@dataclass(frozen=True, slots=True)
class SpecFacts:
    """A spec as it was found.

    Args:
        name: of its exact class.
        layers: that have it.
        flags: fields that are not at their defaults, and those that have none.
    """

    name: str
    layers: tuple[str, ...]
    flags: tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a spec is refused.

    Args:
        expected: what would be accepted.
        got: what was found.
        hint: what to do.
        is_known: it was looked at and cannot work; otherwise nobody here has looked.
    """

    expected: str
    got: str
    hint: str
    is_known: bool


def changed_fields(value: Any) -> tuple[tuple[str, object], ...]:
    """The fields of a dataclass that differ from their defaults, and those without one."""
    changed = []
    for each in fields(value):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        found = getattr(value, each.name)
        if default is MISSING or found != default:
            changed.append((each.name, found))
    return tuple(changed)


def describe(spec: Any, layers: tuple[str, ...]) -> SpecFacts:
    """What the table needs of a spec of the engine. A class from elsewhere is not taken for vLLM's of the same name."""
    cls = type(spec)
    name = cls.__name__ if cls.__module__ == _HOME else f"{cls.__module__}.{cls.__name__}"
    return SpecFacts(name, layers, changed_fields(spec))


def accepted_classes() -> list[str]:
    """Classes of groups that can be stored."""
    return [name for name, spec in KNOWN.items() if not spec.refused and not spec.needs_scratch]


def spec_problem(spec: SpecFacts, *, is_cacheable: bool, is_drafter: bool) -> Problem | None:
    """Why a prefix cannot be resumed from a group of this spec; None if it can."""
    known = KNOWN.get(spec.name)
    where = f"{spec.name} (layers {', '.join(spec.layers[:2])}, ...)"
    if known is None:
        return Problem(
            "one of " + ", ".join(accepted_classes()),
            where,
            "hybridkv stores no KV whose meaning it does not know; start without it, or report the model",
            is_known=False,
        )
    if known.refused or (known.needs_scratch and is_cacheable):
        why = known.refused or "vLLM keeps it for one request alone, and yet says that others may read it"
        return Problem("one of " + ", ".join(accepted_classes()), f"{where}: {why}", _WITHOUT, is_known=True)
    flags, found = known_flags(spec.name), dict(spec.flags)
    problems: list[Problem | None] = [
        _unfit(spec.name, n, f.unfit_default, f) for n, f in flags.items() if f.unfit_default and n not in found
    ]
    problems += (flag_problem(spec.name, name, value, flags) for name, value in spec.flags)
    if found.get(_DRAFTS) and not is_drafter:
        got = f"{_DRAFTS} True: {flags[_DRAFTS].why}"
        problems.append(Problem(f"{_DRAFTS} in a drafter's group alone", got, flags[_DRAFTS].hint, is_known=True))
    problem = next((each for each in problems if each is not None), None)
    return replace(problem, got=f"{where}: {problem.got}") if problem is not None else None


def flag_problem(owner: str, name: str, value: object, flags: Mapping[str, Flag]) -> Problem | None:
    """Why a field with this value, which is not its default, is refused; None if it is not."""
    shown = str(getattr(value, "name", value))
    flag = flags.get(name)
    if flag is None:
        return Problem(
            f"{owner} with the fields that hybridkv knows",
            f"{name} {shown}, a field that it does not know",
            "this vLLM is newer than hybridkv knows; use one that the compatibility page lists, or report the model",
            is_known=False,
        )
    return None if flag.accepts(value) else _unfit(owner, name, shown, flag)


def _unfit(owner: str, name: str, shown: str, flag: Flag) -> Problem:
    if name == "mamba_cache_mode":
        return Problem(
            "recurrent states at block boundaries (mamba_cache_mode align)",
            f"mamba_cache_mode {shown}",
            "start with --enable-prefix-caching: without it no state is ever kept, so nothing could be restored"
            if shown == "none"
            else "start with --mamba-cache-mode align, the one whose states the engine hands over",
            is_known=True,
        )
    if flag.lists_values:
        got = f"{name} {shown}, a value that nobody here has looked at"
        return Problem(f"{owner} with a {name} that hybridkv knows", got, flag.hint or _WITHOUT, is_known=False)
    return Problem(
        f"{owner} whose {name} is left at its default",
        f"{name} {shown}: {flag.why}",
        flag.hint or _WITHOUT,
        is_known=True,
    )
