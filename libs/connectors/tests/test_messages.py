import dataclasses
import pickle

import pytest

from hybridkv.connectors.vllm.common.copies.table import ChunkCopy, CopyTable
from hybridkv.connectors.vllm.common.messages import Load, LoadFailure, StepOutcome, StepPlan, Store, StoreOutcome
from hybridkv.tiers import Slot

COPY = ChunkCopy(3, b"k" * 32, Slot(((0, 64), (128, 64))), 1, 4, (7, 8, 9))
FAILURE = LoadFailure("checksum", "bytes differ", b"k")


def test_a_plan_survives_pickling() -> None:
    loads = (Load("request", CopyTable.of([COPY])), Load("other", CopyTable(), "refused"))
    plan = StepPlan(loads, (Store(1, CopyTable.of([COPY, COPY])),), (), b"n")
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert plan != StepPlan(plan.loads, plan.stores)


@pytest.mark.parametrize("name", ["loads", "stores", "moves", "namespace"])
def test_a_plan_is_immutable(name: str) -> None:
    plan = StepPlan()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(plan, name, getattr(plan, name))
    assert hash(plan) == hash(StepPlan()), "it contains no list"


def test_outcomes_of_ranks_are_summed_without_losing_failures() -> None:
    first = StepOutcome({1: StoreOutcome(1), 2: StoreOutcome(1)}, {"a": (FAILURE,)})
    second = StepOutcome({1: StoreOutcome(1, "disk"), 3: StoreOutcome(1)}, {"a": (FAILURE,), "b": (FAILURE,)})
    merged = first.aggregate(second)
    assert merged.stores == {1: StoreOutcome(2, "disk"), 2: StoreOutcome(1), 3: StoreOutcome(1)}
    assert merged.load_failures == {"a": (FAILURE, FAILURE), "b": (FAILURE,)}
    assert second.aggregate(first).stores == merged.stores
    assert pickle.loads(pickle.dumps(merged)) == merged
