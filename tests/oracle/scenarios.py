"""Scenarios: what users do to an engine, drawn by hypothesis, and how one is run."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from oracle.content import VOCABULARY_TOKENS, Transcript
from oracle.engine import OracleEngine
from oracle.mixes import Group, Kind, Layers, Mix
from oracle.settings import EngineSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from oracle.settings import Connector

MAX_OUTPUTS = 12


@dataclass(frozen=True, slots=True)
class Prompt:
    """A node of the prompt tree: the first `shared` tokens of prompt `parent`, then `fresh` tokens of its own.

    With `answered` it is the next turn: after all of its parent and the first `answered` tokens of the answer.
    """

    parent: int
    shared: int
    fresh: int
    answered: int = 0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a wave: which prompt, when it comes (in steps), when it is aborted (steps after it came), and its
    transfer parameters."""

    prompt: int
    step: int
    num_outputs: int
    abort_after: int | None = None
    abort_in_step: bool = False
    transfer_params: object = None


@dataclass(frozen=True, slots=True)
class Wave:
    """Requests that come together. Caches may be reset before the wave, and all running requests preempted in it."""

    arrivals: tuple[Arrival, ...]
    reset_engine: bool
    reset_connector: bool
    reset_running_at: int | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    settings: EngineSettings
    prompts: tuple[Prompt, ...]
    waves: tuple[Wave, ...]

    def tokens(self) -> list[list[int]]:
        return tokens_of(self.prompts)


def tokens_of(prompts: Sequence[Prompt]) -> list[list[int]]:
    """The prompts as tokens. Fresh tokens depend on the prompt's number only."""
    built: list[list[int]] = []
    for number, prompt in enumerate(prompts):
        stem = _stem(built[prompt.parent], prompt) if built else []
        generator = random.Random(number)
        built.append([*stem, *(generator.randrange(VOCABULARY_TOKENS) for _ in range(prompt.fresh))])
    return built


def _stem(parent: list[int], prompt: Prompt) -> list[int]:
    return Transcript(parent, prompt.answered).tokens if prompt.answered else parent[: prompt.shared]


@dataclass(slots=True)
class Tally:
    """Counts of the scenarios of a test, to show that it tested what it claims."""

    scenarios: int = 0
    with_restored: int = 0
    with_local_hits: int = 0
    with_preemptions: int = 0
    with_failed_loads: int = 0
    restored_tokens: int = 0
    steps: int = 0

    def add(self, engine: OracleEngine) -> None:
        self.scenarios += 1
        self.with_restored += engine.restored_tokens > 0
        self.with_local_hits += engine.local_hit_tokens > 0
        self.with_preemptions += engine.preemptions > 0
        self.with_failed_loads += engine.failed_loads > 0
        self.restored_tokens += engine.restored_tokens
        self.steps += engine.num_steps


def _lengths(unit: int) -> st.SearchStrategy[int]:
    """Prompt lengths around multiples of the scheduler block, where most bugs are, and any others."""
    most = 3 if unit >= 64 else 8
    near = st.builds(
        lambda units, offset: max(1, units * unit + offset),
        st.integers(1, most),
        st.sampled_from((0, 0, 1, -1, unit // 2)),
    )
    return near | st.integers(1, most * unit)


@st.composite
def prompt_trees(draw: st.DrawFn, mix: Mix, unit_tokens: int | None = None) -> tuple[Prompt, ...]:
    """Prompts with common beginnings. Their lengths are around multiples of a unit: of the mix, or a larger one."""
    unit = unit_tokens or mix.alignment_tokens
    prompts = [Prompt(0, 0, draw(_lengths(unit)))]
    sizes = [prompts[0].fresh]
    for _ in range(draw(st.integers(1, 4))):
        parent = draw(st.integers(0, len(prompts) - 1))
        shared = min(draw(_lengths(unit)), sizes[parent])
        fresh = draw(st.integers(0 if shared else 1, 2 * min(unit, 32)))
        prompts.append(Prompt(parent, shared, fresh))
        sizes.append(shared + fresh)
    return tuple(prompts)


@st.composite
def _wave(draw: st.DrawFn, num_prompts: int) -> Wave:
    arrivals = []
    for _ in range(draw(st.integers(1, 4))):
        abort = draw(st.sampled_from((None, None, None, 0, 1, 2, 4)))
        arrivals.append(
            Arrival(
                draw(st.integers(0, num_prompts - 1)),
                draw(st.integers(0, 4)),
                draw(st.integers(1, MAX_OUTPUTS)),
                abort,
                abort is not None and draw(st.booleans()),
            )
        )
    return Wave(
        tuple(arrivals),
        reset_engine=draw(st.sampled_from((True, True, False))),
        reset_connector=draw(st.sampled_from((False,) * 7 + (True,))),
        reset_running_at=draw(st.sampled_from((None,) * 5 + (2, 5))),
    )


@st.composite
def scenarios(
    draw: st.DrawFn,
    mix: Mix,
    prefix_caching: st.SearchStrategy[bool] | None = None,
    unit_tokens: int | None = None,
    draws_ahead: bool = False,
) -> Scenario:
    """A scenario for a mix, without a connector: set one with `with_connector`. Its steps may be planned ahead if
    `draws_ahead`."""
    prompts = draw(prompt_trees(mix, unit_tokens))
    waves = tuple(draw(_wave(len(prompts))) for _ in range(draw(st.integers(2, 3))))
    step_tokens = draw(st.sampled_from((16, 24, 64, 256)))
    if mix.has_recurrent:
        step_tokens = max(step_tokens, mix.alignment_tokens)
    sizes: list[int] = []
    for prompt in prompts:
        sizes.append((min(prompt.shared, sizes[prompt.parent]) if sizes else 0) + prompt.fresh)
    most_tokens = max(sizes) + MAX_OUTPUTS
    enough = mix.max_blocks(most_tokens, step_tokens) + 1
    settings = EngineSettings(
        num_blocks=enough + draw(st.sampled_from((2, enough // 2, 3 * enough))),
        max_step_tokens=step_tokens,
        max_running=draw(st.integers(1, 4)),
        prefix_caching=mix.has_recurrent or prefix_caching is None or draw(prefix_caching),
        retention_tokens=draw(st.sampled_from((0, 0, None, mix.alignment_tokens if mix.is_sparse else 0))),
        runner=draw(st.sampled_from(("v1", "v2"))),
        async_scheduling=draws_ahead and draw(st.booleans()),
    )
    if settings.async_scheduling:
        # A window keeps the blocks that left it until the step that was planned ahead has run, too.
        more = mix.max_blocks(most_tokens, 2 * step_tokens) + 1 - enough
        settings = replace(settings, num_blocks=settings.num_blocks + more)
    return Scenario(settings, prompts, waves)


def with_connector(scenario: Scenario, connector: Connector) -> Scenario:
    settings = scenario.settings
    used = connector if settings.prefix_caching else connector.without_prefix_caching()
    return replace(scenario, settings=replace(settings, connector=used))


@st.composite
def mixes(draw: st.DrawFn, of: tuple[Kind, ...] = tuple(Kind), is_packed: bool | None = None) -> Mix:
    """Any mix of 1 to 5 groups. With CHUNKED groups all block sizes are equal, as vLLM requires, and with RECURRENT
    ones states have the largest blocks, as vLLM makes them."""
    kinds = draw(st.lists(st.sampled_from(of), min_size=1, max_size=5))
    packed = draw(st.booleans()) if is_packed is None else is_packed
    size = draw(st.sampled_from((4, 8, 16)))
    sizes = [size]
    if Kind.CHUNKED not in kinds and Kind.RECURRENT in kinds:
        sizes = [size, size // 2, size // 4]
    elif Kind.CHUNKED not in kinds and packed:
        sizes = [2, 4, 8, 16, 32]
    groups = []
    for kind in kinds:
        block_tokens = size if kind is Kind.RECURRENT else draw(st.sampled_from(sizes))
        reach = 0
        if kind is Kind.WINDOW:
            reach = draw(st.integers(2, 5 * block_tokens))
        elif kind is Kind.CHUNKED:
            reach = block_tokens * draw(st.integers(1, 4))
        # Pages that are not packed have one size.
        heads = draw(st.sampled_from((1, 2))) if packed else 2 * size // block_tokens
        layers = (Layers(draw(st.integers(1, 3)), cell_bytes=16, heads=heads),)
        page = None
        if kind is Kind.RECURRENT:
            page = size * 32
            layers = (Layers(layers[0].count, cell_bytes=page - 8 * draw(st.integers(0, 4))),)
        groups.append(Group(kind, block_tokens, layers, reach, page_bytes=page))
    return Mix("random", tuple(groups), "BLHNC" if packed else "LBHNC")


def run(mix: Mix, scenario: Scenario, before_step: Callable[[OracleEngine, int], None] | None = None) -> OracleEngine:
    """Runs a scenario to its end and checks everything; returns the closed engine for its counters."""
    return run_on(OracleEngine(mix, scenario.settings, before_step), scenario)


def run_on(made: OracleEngine, scenario: Scenario) -> OracleEngine:
    """The same on an engine that was made for it."""
    tokens = scenario.tokens()
    with made as engine:
        for number, wave in enumerate(scenario.waves):
            if number > 0 and wave.reset_engine:
                engine.reset_prefix_cache()
            if number > 0 and wave.reset_connector:
                engine.reset_connector()
            _run_wave(engine, number, wave, tokens)
            engine.drain()
            engine.check_idle()
    return engine


def _run_wave(engine: OracleEngine, number: int, wave: Wave, tokens: Sequence[Sequence[int]]) -> None:
    last = max(arrival.step + (arrival.abort_after or 0) for arrival in wave.arrivals)
    for step in range(last + 1):
        for index, arrival in enumerate(wave.arrivals):
            name = f"wave{number}-request{index}"
            if arrival.step == step:
                said = arrival.transfer_params
                engine.submit(name, tokens[arrival.prompt], arrival.num_outputs, transfer_params=said)
            if arrival.abort_after is not None and arrival.step + arrival.abort_after == step:
                engine.abort(name, in_step=arrival.abort_in_step)
        if wave.reset_running_at == step:
            engine.preempt_all()
        engine.step()
