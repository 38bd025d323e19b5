"""Where recurrent states are placed in a prompt.

A request can resume only where every RECURRENT group has a state, and an engine hands over about one a prompt, at its
end. A connector can have the engine stop at further boundaries and hand over the states there; each costs the engine a
step and the store its bytes. This package says which stops are worth that, from what it learns of requests.
"""

from hybridkv.planner.checkpoints.awaited import AwaitedStates
from hybridkv.planner.checkpoints.experience import NO_EXPERIENCE, Experience, learn_request, learn_stored
from hybridkv.planner.checkpoints.placement import next_stop, plan_stops
from hybridkv.planner.checkpoints.seen import SeenPrefixes
from hybridkv.planner.checkpoints.values import (
    Costs,
    LeftOut,
    Limits,
    Market,
    Placement,
    Prompt,
    Stop,
    StopReason,
)

__all__ = [
    "NO_EXPERIENCE",
    "AwaitedStates",
    "Costs",
    "Experience",
    "LeftOut",
    "Limits",
    "Market",
    "Placement",
    "Prompt",
    "SeenPrefixes",
    "Stop",
    "StopReason",
    "learn_request",
    "learn_stored",
    "next_stop",
    "plan_stops",
]
