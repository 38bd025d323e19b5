"""Placement of recurrent states in a prompt.

A request can resume only at a boundary where every RECURRENT group has a state. An engine provides about one state for
each prompt, at its end. A connector can stop the engine at further boundaries and store the states there. Each stop
costs one step of the engine, and space in the store. This package chooses the stops that are worth their cost, from
statistics of earlier requests.
"""

from hybridkv.planner.checkpoints.answer_reuse import AnswerReuse
from hybridkv.planner.checkpoints.experience import NO_EXPERIENCE, Experience, learn_request, learn_stored
from hybridkv.planner.checkpoints.placement import next_stop, plan_stops
from hybridkv.planner.checkpoints.seen import SeenPrefixes
from hybridkv.planner.checkpoints.values import (
    Costs,
    LeftOut,
    Limits,
    Placement,
    Prompt,
    Stop,
    StopReason,
    StoreUsage,
)

__all__ = [
    "NO_EXPERIENCE",
    "AnswerReuse",
    "Costs",
    "Experience",
    "LeftOut",
    "Limits",
    "Placement",
    "Prompt",
    "SeenPrefixes",
    "Stop",
    "StopReason",
    "StoreUsage",
    "learn_request",
    "learn_stored",
    "next_stop",
    "plan_stops",
]
