"""Scenarios of two engines that exchange KV, with users, a proxy, networks and operators: drawn by hypothesis, as
values."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from hybridkv.connectors.vllm import PEER_CONNECTOR
from hybridkv.peers.transport import TransferFailureReason
from kits.peers.faults import Fail, FaultPlan, HalfDone, Late, Lost, Rule, Vanish, WrongBytes
from oracle.scenarios import MAX_OUTPUTS, Prompt, prompt_trees
from oracle.settings import Connector, EngineSettings

if TYPE_CHECKING:
    from oracle.mixes import Mix
    from oracle.peer_mixes import Sides

LEASE_S, LOAD_S, CONNECT_S = 6.0, 40.0, 2.0
FIRST_PORT = 30000
MAX_FRESH = 24


class Proxy(enum.Enum):
    """Handling of a producer's answer by the proxy."""

    HONEST = "it arrives as it was"
    FORGETFUL = "a key is lost"
    MIXED_UP = "it arrives with another prompt"
    TWICE = "two requests get it at once, and one when they are over"


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt of a talk: prefilled at `source`, decoded at the other engine. Times are rounds."""

    fresh: int
    source: int
    wait: int
    num_outputs: int
    proxy: Proxy = Proxy.HONEST
    abort_source_after: int | None = None
    abort_target_after: int | None = None


@dataclass(frozen=True, slots=True)
class Talk:
    """Prompts that each continue the one before, the first from a prompt of the tree."""

    prompt: int
    begins: int
    turns: tuple[Turn, ...]


class What(enum.Enum):
    CUT = "all connections end"
    STALL = "nothing is carried between the engines"
    RESUME = "and again it is"
    JUMP = "time passes"
    KILL = "an engine is killed, and another one started in its place"
    RESTART = "an engine is shut down, and another one started in its place"
    PREEMPT = "all of an engine's running requests are preempted"
    FORGET = "an engine's prefix cache is emptied, if nobody uses it"


@dataclass(frozen=True, slots=True)
class Trouble:
    """An event in a round, of an engine or for some seconds."""

    round: int
    what: What
    side: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PeerScenario:
    settings: tuple[EngineSettings, EngineSettings]
    prompts: tuple[Prompt, ...]
    talks: tuple[Talk, ...]
    troubles: tuple[Trouble, ...]
    plan: FaultPlan
    seed: int

    @property
    def is_calm(self) -> bool:
        """Whether no event gives a read a reason to fail."""
        turns = [turn for talk in self.talks for turn in talk.turns]
        aborts = any(turn.abort_source_after is not None or turn.abort_target_after is not None for turn in turns)
        honest = all(turn.proxy is Proxy.HONEST for turn in turns)
        gentle = {What.PREEMPT, What.FORGET}
        return not self.plan.rules and not aborts and honest and all(each.what in gentle for each in self.troubles)


ACTIONS = (
    st.builds(
        Fail, st.sampled_from([TransferFailureReason.GONE, TransferFailureReason.BROKEN, TransferFailureReason.BUSY])
    ),
    st.builds(Late, st.integers(1, 40)),
    st.just(Lost()),
    st.builds(HalfDone, st.integers(0, 3)),
    st.just(Vanish()),
)
BYTES = (*ACTIONS, st.builds(WrongBytes, st.integers(0, 1 << 20)))


def plans(verify: bool) -> st.SearchStrategy[FaultPlan]:
    """A third of them without faults. Only digests can find a wrong byte."""
    rules = st.builds(Rule, st.one_of(*(BYTES if verify else ACTIONS)), nth=st.sampled_from((None, 1, 2, 3, 4, 6, 9)))
    some = st.lists(rules, min_size=1, max_size=3).map(lambda chosen: FaultPlan(tuple(chosen)))
    return st.one_of(st.just(FaultPlan()), some, some)


def _rarely(draw: st.DrawFn, most: int) -> int | None:
    return draw(st.integers(0, most)) if draw(st.sampled_from((False,) * 5 + (True,))) else None


@st.composite
def _talk(draw: st.DrawFn, num_prompts: int, both: bool, is_rough: bool) -> Talk:
    turns = []
    for number in range(draw(st.sampled_from((1, 1, 2, 3)))):
        proxy = Proxy.HONEST
        if is_rough and draw(st.sampled_from((False, False, True))):
            proxy = draw(st.sampled_from(list(Proxy)))
        turns.append(
            Turn(
                fresh=draw(st.integers(1, MAX_FRESH)) if number else 0,
                source=draw(st.integers(0, 1)) if both else 0,
                wait=draw(st.sampled_from((0, 0, 1, 3, 12, 30))),
                num_outputs=draw(st.integers(1, MAX_OUTPUTS)),
                proxy=proxy,
                abort_source_after=_rarely(draw, 8) if is_rough else None,
                abort_target_after=_rarely(draw, 24) if is_rough else None,
            )
        )
    return Talk(draw(st.integers(0, num_prompts - 1)), draw(st.integers(0, 12)), tuple(turns))


@st.composite
def _troubles(draw: st.DrawFn) -> tuple[Trouble, ...]:
    found: list[Trouble] = []
    for _ in range(draw(st.sampled_from((0, 1, 2, 3, 4)))):
        what = draw(st.sampled_from([What.JUMP, *(what for what in What if what is not What.RESUME)]))
        trouble = Trouble(
            draw(st.integers(1, 50)),
            what,
            draw(st.integers(0, 1)),
            draw(st.sampled_from((1.0, 2 * LEASE_S, 2 * LOAD_S))),
        )
        found.append(trouble)
        if what is What.STALL:
            found.append(Trouble(trouble.round + draw(st.integers(1, 60)), What.RESUME))
    return tuple(sorted(found, key=lambda trouble: trouble.round))


@st.composite
def peer_scenarios(draw: st.DrawFn, sides: Sides, verify: bool | None = None) -> PeerScenario:
    """A scenario for two engines, one in four of them calm. Digests are compared in two of three, unless `verify` is
    given."""
    is_rough = draw(st.sampled_from((True, True, True, False)))
    largest = max(sides.mixes, key=lambda mix: mix.alignment_tokens)
    prompts = draw(prompt_trees(largest))
    both = draw(st.sampled_from((False, False, True)))
    num_talks = draw(st.integers(1, 5))
    talks = tuple(draw(_talk(len(prompts), both, is_rough)) for _ in range(num_talks))
    if verify is None:
        verify = draw(st.sampled_from((True, True, False)))
    options = {
        "weights_digest": "oracle",
        "verify": verify,
        "lease_seconds": LEASE_S,
        "load_timeout_seconds": LOAD_S,
        "connect_timeout_seconds": CONNECT_S,
        "max_leases": draw(st.sampled_from((1, 2, 64))),
    }
    longest = _longest(prompts, talks)
    settings = tuple(
        _settings(draw, mix, longest, (side, sides.tp_sizes[side]), options, both)
        for side, mix in enumerate(sides.mixes)
    )
    return PeerScenario(
        (settings[0], settings[1]),
        prompts,
        talks,
        draw(_troubles()) if is_rough else (),
        draw(plans(verify)) if is_rough else FaultPlan(),
        draw(st.integers(0, 1 << 32)),
    )


def _longest(prompts: tuple[Prompt, ...], talks: tuple[Talk, ...]) -> int:
    """Tokens of the longest talk."""
    sizes: list[int] = []
    for prompt in prompts:
        sizes.append((min(prompt.shared, sizes[prompt.parent]) if sizes else 0) + prompt.fresh)
    said = (sizes[talk.prompt] + sum(turn.fresh + turn.num_outputs for turn in talk.turns) for talk in talks)
    return max(said) + MAX_OUTPUTS


def _settings(
    draw: st.DrawFn, mix: Mix, longest: int, place: tuple[int, int], options: dict[str, object], both: bool
) -> EngineSettings:
    side, tp_size = place
    step_tokens = draw(st.sampled_from((24, 64, 256)))
    if mix.has_recurrent:
        step_tokens = max(step_tokens, mix.alignment_tokens)
    enough = mix.max_blocks(longest, step_tokens) + 1
    listen = {"host": "127.0.0.1", "port": FIRST_PORT + 100 * side}
    role = "kv_both" if both else ("kv_producer", "kv_consumer")[side]
    return EngineSettings(
        num_blocks=enough + draw(st.sampled_from((2, enough // 2, 3 * enough))),
        max_step_tokens=step_tokens,
        max_running=draw(st.integers(1, 4)),
        retention_tokens=draw(st.sampled_from((0, 0, None, mix.alignment_tokens if mix.is_sparse else 0))),
        runner=draw(st.sampled_from(("v1", "v2"))),
        connector=Connector(PEER_CONNECTOR, {**options, "listen": listen}, role=role),
        seed=side,
        tp_size=tp_size,
    )
