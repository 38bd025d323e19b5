"""Which states of answers give way to a newer one."""

from __future__ import annotations

import enum

import msgspec


class Supersession(enum.StrEnum):
    """Why a state is of no more use."""

    ANSWER = "answer"
    """The same answer has a newer one."""
    TURN = "turn"
    """The next turn of the conversation has a newer one."""


class Kept(msgspec.Struct, frozen=True):
    """What a state that was stored changes. All numbers are tokens from the request's start."""

    answer_tokens: int = 0
    """The state is the newest of an answer, and stands here; 0 where it is of a prompt."""
    superseded: tuple[tuple[int, Supersession], ...] = ()
    """States of answers that nobody needs any more, and why."""


def keep(prompt_tokens: int, state_tokens: int, newest_tokens: int = 0, resumed_tokens: int = 0) -> Kept | None:
    """What becomes of the states of answers, now that the one at `state_tokens` is stored.

    Of one path the newest serves all that follows; states at stops and at ends of prompts are where others resume, and
    stay.

    Args:
        prompt_tokens: of the request.
        state_tokens: where the state was stored.
        newest_tokens: the deepest state of this request before it, or 0.
        resumed_tokens: the state of the last turn's answer from which the request goes on, or 0.

    Returns:
        None where a deeper state is there already.
    """
    if state_tokens <= max(newest_tokens, resumed_tokens):
        return None
    superseded = [(resumed_tokens, Supersession.TURN)] if resumed_tokens > 0 else []
    is_answer = state_tokens > prompt_tokens
    if is_answer and newest_tokens > prompt_tokens:
        superseded.append((newest_tokens, Supersession.ANSWER))
    return Kept(state_tokens if is_answer else 0, tuple(superseded))
