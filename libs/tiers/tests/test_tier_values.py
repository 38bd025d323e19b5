"""Values exchanged between the two halves of a tier."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.tiers import Failure, FailureReason, LookupAnswer, Refusal, Slot, TierCounts

amounts = st.integers(min_value=0, max_value=1 << 40)
counts = st.builds(
    TierCounts,
    reservations=amounts,
    commits=amounts,
    aborts=amounts,
    invalidations=amounts,
    evictions=amounts,
    evicted_bytes=amounts,
    refusals=st.dictionaries(st.sampled_from(Refusal), st.integers(min_value=1, max_value=9)),
    answers=st.dictionaries(st.sampled_from(LookupAnswer), st.integers(min_value=1, max_value=9)),
)


def test_a_slot_is_encoded_as_a_plain_array() -> None:
    slot = Slot(((4096, 4096), (12288, 100)))
    message = msgspec.msgpack.encode(slot)
    assert msgspec.msgpack.decode(message) == [[[4096, 4096], [12288, 100]]]
    assert msgspec.msgpack.decode(message, type=Slot) == slot


def test_a_slot_has_a_size_and_a_first_offset() -> None:
    slot = Slot(((4096, 4096), (12288, 100)))
    assert (slot.num_bytes, slot.first_offset) == (4196, 4096)
    with pytest.raises(ValueError, match="without extents"):
        _ = Slot(()).first_offset


def test_a_failure_prints_reason_and_detail() -> None:
    assert str(Failure(FailureReason.IO, "disk gone")) == "io: disk gone"
    assert str(Failure(FailureReason.MISSING)) == "missing"


@given(counts, counts, counts)
def test_merging_counts_is_commutative_and_associative(a: TierCounts, b: TierCounts, c: TierCounts) -> None:
    assert a.merge(b) == b.merge(a)
    assert a.merge(b).merge(c) == a.merge(b.merge(c))
    assert a.merge(TierCounts()) == a


@given(counts, counts)
def test_merging_counts_changes_no_operand(a: TierCounts, b: TierCounts) -> None:
    before = msgspec.json.encode([a, b])
    a.merge(b)
    assert msgspec.json.encode([a, b]) == before


def test_tiers_load_neither_torch_nor_vllm() -> None:
    program = (
        "import sys, hybridkv.tiers, hybridkv.tiers.ram, hybridkv.tiers.disk\n"
        "import kits.tiers.conformance, kits.tiers.copying\n"
        "import kits.tiers.faults, kits.tiers.reference\n"
        "sys.exit(', '.join({'torch', 'vllm', 'pytest', 'hypothesis'} & set(sys.modules)) or 0)"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
