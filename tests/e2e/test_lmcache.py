"""A lost prefix is restored from a server of LMCache with equal tokens, log-probabilities and bytes.

One engine in the test's process, for each version of the server. Each test has its own prompts, because the server
never forgets.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import patience
import pytest
import torch
from equality import require_close, require_same, require_same_output
from harness import Engine, Result, make_prompt
from lmcache_site import CHUNK_TOKENS, ENGINE_ARGUMENTS, LMCacheSite, flip_a_byte, prompt_lengths
from lmcache_witness import Link, LMCacheAudit, PageName
from noise import Noise, own_cache_only

from hybridkv.connectors.vllm.lmcache import load_tracker
from hybridkv.planner import GroupKind

_SEEDS = itertools.count(1000, 1000)


@pytest.fixture(scope="module")
def kv_transfer_config(site: LMCacheSite) -> dict[str, Any]:
    return site.transfer()


@pytest.fixture(scope="module")
def engine_arguments(kind: str) -> dict[str, Any]:
    return ENGINE_ARGUMENTS.get(kind, {})


@pytest.fixture(scope="module")
def watching(engine: Engine) -> LMCacheAudit:
    audit = LMCacheAudit(engine)
    audit.attach()
    return audit


@pytest.fixture
def prompts(kind: str) -> list[list[int]]:
    """Prompts that no other test uses."""
    seed = next(_SEEDS)
    return [make_prompt(length, seed=seed + number) for number, length in enumerate(prompt_lengths(kind, 2))]


@pytest.fixture(scope="module")
def link(engine: Engine, site: LMCacheSite) -> Link:
    """The engine's link to its server. Prompts computed before the server was found are not stored."""
    link = Link(engine, site)
    link.require_up()
    return link


def one_by_one(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[Result]:
    return [engine.generate([prompt])[0] for prompt in prompts]


def stored(link: Link, prompts: Sequence[Sequence[int]]) -> list[Result]:
    """Results of computed prompts. Afterwards the server holds them, and the engine does not."""
    link.engine.reset_prefix_cache()
    results = one_by_one(link.engine, prompts)
    link.settle()
    link.engine.reset_prefix_cache()
    return results


def computed(engine: Engine, prompt: Sequence[int]) -> Result:
    """The result of the engine without the connector."""
    engine.reset_prefix_cache()
    with own_cache_only(engine):
        [result] = one_by_one(engine, [prompt])
    engine.reset_prefix_cache()
    assert result.num_cached_tokens == 0
    return result


def restorable(kind: str, prompt: Sequence[int]) -> int:
    """Whole chunks of the server, leaving at least one token to compute."""
    return (len(prompt) - 1) // CHUNK_TOKENS[kind] * CHUNK_TOKENS[kind]


def recurrent_groups(engine: Engine) -> set[int]:
    groups = engine.connector._layout.spec.groups
    return {index for index, group in enumerate(groups) if group.kind is GroupKind.RECURRENT}


def cached(results: Sequence[Result]) -> list[int]:
    return [result.num_cached_tokens for result in results]


def test_a_restored_prefix_equals_the_cold_run_and_the_engines_own_hit(
    engine: Engine, link: Link, audit: LMCacheAudit, prompts: list[list[int]], kind: str
) -> None:
    cold = one_by_one(engine, prompts)
    local = one_by_one(engine, prompts)
    link.settle()
    assert audit.restored_tokens == 0
    engine.reset_prefix_cache()
    warm = one_by_one(engine, prompts)
    require_same(audit, cold, warm)
    require_same(audit, local, warm)
    expected = [restorable(kind, prompt) for prompt in prompts]
    assert cached(cold) == [0, 0]
    assert cached(warm) == expected
    assert audit.restored_tokens == sum(expected)
    assert audit.restored_groups() == set(engine.connector._layout.spec.stored_groups)


def test_shorter_and_longer_prompts_restore_their_common_prefix(
    engine: Engine, link: Link, audit: LMCacheAudit, prompts: list[list[int]], kind: str
) -> None:
    prompt, chunk = prompts[1], CHUNK_TOKENS[kind]
    shorter = prompt[: len(prompt) - chunk]
    stored(link, [shorter, prompt])
    longer = make_prompt(len(prompt) + chunk, seed=next(_SEEDS), prefix=prompt)
    branching = make_prompt(len(prompt), seed=next(_SEEDS), prefix=prompt[: 2 * chunk + 1])
    for other, expected in ((shorter, 2 * chunk), (longer, 3 * chunk), (branching, 2 * chunk)):
        audit.forget()
        warm = engine.generate([other])
        assert (cached(warm), audit.restored_tokens) == ([expected], expected)
        require_same(audit, [computed(engine, other)], warm)


def test_only_tokens_that_the_engine_lacks_are_restored(
    engine: Engine, link: Link, audit: LMCacheAudit, prompts: list[list[int]], kind: str
) -> None:
    """The engine holds a part of the prefix, and the restored state must fit it."""
    long, short = prompts[1], prompts[1][: len(prompts[0])]
    cold = stored(link, [long])
    with own_cache_only(engine):
        one_by_one(engine, [short])
    audit.forget()
    warm = one_by_one(engine, [long])
    require_same(audit, cold, warm)
    assert cached(warm) == [restorable(kind, long)]
    assert audit.restored_tokens == restorable(kind, long) - restorable(kind, short)


def test_a_prefix_is_resumed_only_if_every_group_has_its_state(
    engine: Engine, link: Link, audit: LMCacheAudit, prompts: list[list[int]], kind: str
) -> None:
    """A state is stored only at the end of a prompt's last whole block."""
    long, short = prompts[1], prompts[1][: len(prompts[0])]
    stored(link, [long])
    audit.forget()
    warm = one_by_one(engine, [short])
    assert cached(warm) == [0 if recurrent_groups(engine) else restorable(kind, short)]
    require_same_output(warm, [computed(engine, short)])


def test_requests_with_shared_prefixes_equal_the_engines_own_hits(
    engine: Engine, link: Link, audit: LMCacheAudit, kind: str, noise: Noise
) -> None:
    seed, length = next(_SEEDS), prompt_lengths(kind, 1)[0]
    stems = [make_prompt(CHUNK_TOKENS[kind], seed=seed + i) for i in range(2)]
    prompts = [make_prompt(length, seed=seed + 10 + i, prefix=stems[i % 2]) for i in range(4)]
    stored(link, prompts)
    with own_cache_only(engine):
        one_by_one(engine, prompts)
        local = engine.generate(prompts)
    engine.reset_prefix_cache()
    audit.forget()
    warm = engine.generate(prompts)
    assert cached(warm) == cached(local) == [restorable(kind, prompt) for prompt in prompts]
    assert audit.restored_tokens >= restorable(kind, prompts[0])
    # Loads end in different steps, so the batches differ.
    require_close(audit, local, warm, noise)


def test_a_group_restored_as_zeros_is_detected(
    engine: Engine, link: Link, audit: LMCacheAudit, prompts: list[list[int]]
) -> None:
    """Control, for each group: pages are changed after the checksum and before any computation."""
    prompts = prompts[:1]
    cold = stored(link, prompts)
    for group in engine.connector._layout.spec.stored_groups:

        def zero(place: PageName, pages: list[torch.Tensor], group: int = group) -> None:
            for page in pages if place[1] == group else ():
                page.zero_()

        warm = tampered(engine, audit, prompts, zero)
        with pytest.raises(AssertionError):
            require_same(audit, cold, warm)
        assert {mismatch.split()[1] for mismatch in audit.mismatches} == {str(group)}
        assert not all(a.same_output(b) for a, b in zip(cold, warm, strict=True)), (
            f"group {group} was zeroed and log-probabilities stayed equal: they prove nothing"
        )


def test_a_recurrent_state_of_another_boundary_is_detected(
    engine: Engine, link: Link, audit: LMCacheAudit, prompts: list[list[int]]
) -> None:
    """Control: a valid state of an earlier position in the same prompt."""
    recurrent = recurrent_groups(engine)
    if not recurrent:
        pytest.skip("this model has no recurrent group")
    prompt = prompts[-1]
    audit.pages.clear()
    cold = stored(link, [prompt[: len(prompts[0])], prompt])[1:]
    first = {place[1]: pages for place, pages in reversed(audit.pages.items()) if place[1] in recurrent}

    def put_back(place: PageName, pages: list[torch.Tensor]) -> None:
        for page, earlier in zip(pages, first.get(place[1], pages), strict=True):
            page.copy_(earlier)

    warm = tampered(engine, audit, [prompt], put_back)
    with pytest.raises(AssertionError):
        require_same(audit, cold, warm)
    assert not cold[0].same_output(warm[0])


def tampered(engine: Engine, audit: LMCacheAudit, prompts: list[list[int]], tamper: Any) -> list[Result]:
    """Results of prompts whose restored pages are changed by `tamper`."""
    engine.reset_prefix_cache()
    audit.forget()
    audit.tamper = tamper
    try:
        warm = one_by_one(engine, prompts)
    finally:
        audit.tamper = None
    assert audit.restored_tokens > 0
    engine.reset_prefix_cache()
    return warm


def test_an_abort_at_any_step_leaks_nothing(
    engine: Engine, link: Link, audit: LMCacheAudit, prompts: list[list[int]]
) -> None:
    """During the lookup, the load, the computation and the store."""
    cold = stored(link, prompts[:1])
    for prompt in prompts:
        for steps in range(6):
            request_id = engine.add(prompt, request_id=f"aborted-{len(prompt)}-{steps}")
            for _ in range(steps):
                engine.step()
            engine.abort(request_id)
            engine.drain()
            engine.reset_prefix_cache()
    link.settle()
    audit.forget()
    require_same(audit, cold, one_by_one(engine, prompts[:1]))


@pytest.mark.full
def test_an_engine_hits_the_servers_disk_after_the_server_returns(
    engine: Engine, link: Link, site: LMCacheSite, audit: LMCacheAudit, prompts: list[list[int]], kind: str
) -> None:
    cold = stored(link, prompts)
    site.kill()
    link.require_down()
    without = one_by_one(engine, prompts)
    require_same_output(cold, without)
    assert cached(without) == [0, 0]
    engine.reset_prefix_cache()
    site.start()
    link.require_up()
    audit.forget()
    warm = one_by_one(engine, prompts)
    require_same(audit, cold, warm)
    assert cached(warm) == [restorable(kind, prompt) for prompt in prompts]


@pytest.mark.full
def test_a_changed_byte_in_a_servers_file_is_found_and_stored_again(
    engine: Engine,
    link: Link,
    site: LMCacheSite,
    audit: LMCacheAudit,
    prompts: list[list[int]],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each prompt has other files changed, so that each kind of object is detected separately."""
    monkeypatch.setattr(load_tracker, "SUSPECT_S", 1.0)
    prompts = [*prompts, make_prompt(len(prompts[0]), seed=next(_SEEDS))]
    cold, files = [], []
    for prompt in prompts:
        before = set(site.files())
        cold += stored(link, [prompt])
        # `is_quiet` counts all files, and after a restart the server holds fewer objects than it has files.
        patience.wait_until(lambda before=before: before != set(site.files()), "a file is written", 10.0)  # type: ignore[misc]
        link.settle()
        files.append(set(site.files()) - before)
    kinds = sorted({site.object_group(path) for path in files[0]})
    assert len(kinds) == 1 + site.separate_objects, "one kind for chunks from the beginning, one for the last chunk"
    site.kill()
    for number, new in enumerate(files):
        for path in new:
            if number >= len(kinds) or site.object_group(path) == kinds[number]:
                flip_a_byte(path)
    site.start()
    link.require_up()
    audit.forget()
    warm = one_by_one(engine, prompts)
    require_same_output(cold, warm)
    assert audit.failed_loads >= len(prompts)
    assert (audit.restored_tokens, audit.mismatches) == (0, [])
    wanted = [restorable(kind, prompt) for prompt in prompts]
    # A server deletes bad objects soon, but not immediately and not all at once; until then they are not stored again.
    again: list[Result] = []

    def are_restored() -> bool:
        link.settle()
        stored(link, prompts)
        audit.forget()
        again[:] = one_by_one(engine, prompts)
        require_same_output(cold, again)
        return cached(again) == wanted and audit.failed_loads == 0

    patience.wait_until(are_restored, "all prompts are restored", 10.0)
    require_same(audit, cold, again)
