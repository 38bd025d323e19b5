"""A lost prefix comes back from a server of LMCache, nothing in between: equal tokens, log-probabilities and bytes.

One engine in the test's process, for each version of the server. Every test has prompts of its own, because a server
forgets nothing.
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
    """That no other test has."""
    seed = next(_SEEDS)
    return [make_prompt(length, seed=seed + number) for number, length in enumerate(prompt_lengths(kind, 2))]


@pytest.fixture(scope="module")
def link(engine: Engine, site: LMCacheSite) -> Link:
    """What an engine computes before it has found its server is not stored."""
    link = Link(engine, site)
    link.require_up()
    return link


def one_by_one(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[Result]:
    return [engine.generate([prompt])[0] for prompt in prompts]


def stored(link: Link, prompts: Sequence[Sequence[int]]) -> list[Result]:
    """What prompts give when they are computed. Afterwards the server has them, and the engine has not."""
    link.engine.reset_prefix_cache()
    results = one_by_one(link.engine, prompts)
    link.settle()
    link.engine.reset_prefix_cache()
    return results


def computed(engine: Engine, prompt: Sequence[int]) -> Result:
    """What the engine gives by itself."""
    engine.reset_prefix_cache()
    with own_cache_only(engine):
        [result] = one_by_one(engine, [prompt])
    engine.reset_prefix_cache()
    assert result.num_cached_tokens == 0
    return result


def restorable(kind: str, prompt: Sequence[int]) -> int:
    """Whole chunks of the server, and a token to compute."""
    return (len(prompt) - 1) // CHUNK_TOKENS[kind] * CHUNK_TOKENS[kind]


def recurrent_groups(engine: Engine) -> set[int]:
    groups = engine.connector._layout.spec.groups
    return {index for index, group in enumerate(groups) if group.kind is GroupKind.RECURRENT}


def cached(results: Sequence[Result]) -> list[int]:
    return [result.num_cached_tokens for result in results]


def test_a_lost_prefix_comes_back_equal_to_the_cold_run_and_to_the_engines_own_hit(
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


def test_a_shorter_and_a_longer_prompt_take_what_they_share(
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


def test_only_what_the_engine_lacks_is_restored(
    engine: Engine, link: Link, audit: LMCacheAudit, prompts: list[list[int]], kind: str
) -> None:
    """Part of the prefix is the engine's own, which a state that comes from elsewhere must fit."""
    long, short = prompts[1], prompts[1][: len(prompts[0])]
    cold = stored(link, [long])
    with own_cache_only(engine):
        one_by_one(engine, [short])
    audit.forget()
    warm = one_by_one(engine, [long])
    require_same(audit, cold, warm)
    assert cached(warm) == [restorable(kind, long)]
    assert audit.restored_tokens == restorable(kind, long) - restorable(kind, short)


def test_a_prefix_is_resumed_only_where_every_group_has_something_to_resume_from(
    engine: Engine, link: Link, audit: LMCacheAudit, prompts: list[list[int]], kind: str
) -> None:
    """A state is kept where a prompt's last whole block ends, and nowhere before."""
    long, short = prompts[1], prompts[1][: len(prompts[0])]
    stored(link, [long])
    audit.forget()
    warm = one_by_one(engine, [short])
    assert cached(warm) == [0 if recurrent_groups(engine) else restorable(kind, short)]
    require_same_output(warm, [computed(engine, short)])


def test_requests_that_share_prefixes_equal_the_engines_own_hits(
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
    # Loads end in different steps, so the requests meet in other batches.
    require_close(audit, local, warm, noise)


def test_a_group_that_comes_back_as_zeros_is_seen(
    engine: Engine, link: Link, audit: LMCacheAudit, prompts: list[list[int]]
) -> None:
    """Control, for each group in turn: behind every checksum, and before any token is computed."""
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


def test_the_recurrent_state_of_another_boundary_is_seen(
    engine: Engine, link: Link, audit: LMCacheAudit, prompts: list[list[int]]
) -> None:
    """Control: a state that is a good one, of an earlier place in the same prompt."""
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
    """What prompts give whose restored pages are changed."""
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


def test_aborting_a_request_at_any_step_leaks_nothing(
    engine: Engine, link: Link, audit: LMCacheAudit, prompts: list[list[int]]
) -> None:
    """While it is looked up, while it loads, while it is computed and stored."""
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
def test_an_engine_goes_on_when_the_server_comes_back_and_hits_what_is_on_its_disk(
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
def test_a_changed_byte_in_a_servers_file_is_found_computed_and_stored_anew(
    engine: Engine,
    link: Link,
    site: LMCacheSite,
    audit: LMCacheAudit,
    prompts: list[list[int]],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of each prompt other files, so that what the server keeps of each kind of group is found by itself."""
    monkeypatch.setattr(load_tracker, "SUSPECT_S", 1.0)
    prompts = [*prompts, make_prompt(len(prompts[0]), seed=next(_SEEDS))]
    cold, files = [], []
    for prompt in prompts:
        before = set(site.files())
        cold += stored(link, [prompt])
        files.append(set(site.files()) - before)
    kinds = sorted({site.object_group(path) for path in files[0]})
    assert len(kinds) == 1 + site.separate_objects, "what is read from the first chunk, and what is read of the last"
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
    # A server deletes the bad ones soon, but neither at once nor all together; until then nothing is stored there anew.
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
