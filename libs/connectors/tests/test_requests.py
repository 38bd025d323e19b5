"""Tracked requests follow the tokens of the engine, also after the engine withdrew some."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import patience
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_lookups import FULL, make_layout
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from hybridkv.canonical import LayerLayout
from hybridkv.connectors.vllm.common.blocks.corrupt_blocks import SuspectGroups
from hybridkv.connectors.vllm.common.compat import extra_hash_bytes
from hybridkv.connectors.vllm.common.identity import adapters as module
from hybridkv.connectors.vllm.common.identity.adapters import Adapters
from hybridkv.connectors.vllm.common.identity.files import Signature
from hybridkv.connectors.vllm.common.messages import Store, StoreOutcome
from hybridkv.connectors.vllm.common.requests import Requests, TrackedRequest
from hybridkv.connectors.vllm.common.role import BOTH, Role
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.offload.loads.load_planner import Deadlines
from hybridkv.connectors.vllm.offload.scheduler import Identity, OffloadScheduler
from hybridkv.connectors.vllm.offload.stores.store_planner import _StoreInFlight as StoreInFlight
from hybridkv.hashing import TokenHashes
from hybridkv.planner import Hit, LoadAdmission
from hybridkv.planner.stages import NEW_REQUEST, Compute, Holding, Searched, Stage
from hybridkv.tiers.ram import RamIndex
from hybridkv.tiers.stack import SecondaryTier, TierStack
from kits.tiers.reference import RemoteIndex, RemoteStore

BLOCK = 4
FOUND = Searched(NEW_REQUEST.past, 1, 20, 0, Hit(16))
SOON_S = patience.seconds(6.0)
CHANGES = st.lists(
    st.tuples(st.integers(0, 40), st.lists(st.integers(0, 1), max_size=20), st.booleans()), min_size=1, max_size=8
)
"""Each entry: kept tokens, new tokens, and whether the connector observes the request then."""


def engine_hash(value: Any) -> bytes:
    return repr(value).encode()


def new_request(has_hashes: bool = True) -> Request:
    init_none_hash(engine_hash)
    hasher = get_request_block_hasher(BLOCK, engine_hash) if has_hashes else None
    return Request("r", [1] * 20, SamplingParams(max_tokens=9), None, block_hasher=hasher)


def track(request: Request, reuses_hashes: bool) -> TrackedRequest:
    made = make_layout((FULL,))
    own: Any = SimpleNamespace(spec=made.spec, reuses_hashes=reuses_hashes)
    return Requests(own, made.keys, Adapters(made.keys, 0)).track(request)


def change(request: Request, kept: int, new: list[int]) -> None:
    """Change tokens as the engine's scheduler does at the next input of a session."""
    del request._all_token_ids[kept:]
    del request.block_hashes[kept // BLOCK :]
    request._all_token_ids.extend(new)
    request.update_block_hashes()


@pytest.mark.parametrize("reuses_hashes", [True, False])
def test_other_cache_salts_share_no_key(reuses_hashes: bool) -> None:
    init_none_hash(engine_hash)
    hasher = get_request_block_hasher(BLOCK, engine_hash)

    def keys(salt: str | None) -> list[bytes]:
        sampling = SamplingParams(max_tokens=9)
        request = Request("r", [1] * 20, sampling, None, block_hasher=hasher, cache_salt=salt)
        return list(track(request, reuses_hashes).keys().between(0, 0, 2))

    own, others, unsalted = keys("own"), keys("others"), keys(None)
    assert own == keys("own"), "a tenant finds its own chunks"
    assert len({*own, *others, *unsalted}) == 6, "in no chunk, though only the first block hashes the salt"


@given(CHANGES, st.booleans())
def test_our_hashes_follow_the_present_tokens(changes: list[tuple[int, list[int], bool]], has_hashes: bool) -> None:
    request = new_request(has_hashes)
    tracked = track(request, reuses_hashes=False)
    keys = make_layout((FULL,)).keys
    for kept, new, is_seen in [*changes, (60, [], True)]:
        change(request, kept, new)
        if is_seen:
            fresh = keys.token_hashes(lambda start, end: extra_hash_bytes(request, start, end))
            assert tracked.prefix_hashes() == fresh.prefix_hashes(list(request.all_token_ids))


def test_unchanged_tokens_are_not_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    unchanged: list[int] = []
    plain = TokenHashes.prefix_hashes

    def prefix_hashes(self: TokenHashes, tokens: Any, unchanged_tokens: int = 0) -> list[bytes]:
        unchanged.append(unchanged_tokens)
        return plain(self, tokens, unchanged_tokens)

    monkeypatch.setattr(TokenHashes, "prefix_hashes", prefix_hashes)
    request = new_request()
    tracked = track(request, reuses_hashes=False)
    for _ in range(3):
        tracked.prefix_hashes()
        request.append_output_token_ids([5] * BLOCK)
    assert unchanged == [0, 20, 24]


@pytest.mark.parametrize("reuses_hashes", [True, False])
@pytest.mark.parametrize("stage", [FOUND, Holding(FOUND)], ids=["searched", "holding"])
@pytest.mark.parametrize(("kept", "is_lost"), [(20, False), (17, True), (8, True)])
def test_results_for_withdrawn_tokens_are_forgotten(
    reuses_hashes: bool, kept: int, is_lost: bool, stage: Stage
) -> None:
    request = new_request()
    tracked = track(request, reuses_hashes)
    tracked.follow()
    tracked.stage, tracked.last_reply = stage, Compute()
    tracked.stored_tokens, tracked.planned_chunks = 16, (2, 2)
    change(request, kept, [0] * (20 - kept))
    assert request.num_tokens == 20
    tracked.follow()
    forgotten = (tracked.stage, tracked.last_reply, tracked.stored_tokens, tracked.planned_chunks)
    assert (forgotten == (NEW_REQUEST, None, 0, (0, 0))) is is_lost


def new_scheduler(kv_role: Role = BOTH, slower: Sequence[SecondaryTier] = ()) -> OffloadScheduler:
    """Scheduler half of an engine with one FULL group, nothing stored, and adapter files that are an hour old."""
    made, later_ns = make_layout((FULL,)), time.time_ns() + 3600 * 10**9
    return OffloadScheduler(
        dataclasses.replace(made.layout, layers=((LayerLayout("layer0", 64),),)),
        Identity(made.keys, Adapters(made.keys, later_ns, lambda: later_ns)),
        TierStack(RamIndex(1 << 20, 4096), slower, 1, lambda: 0.0),
        LoadAdmission(made.spec, 64),
        Deadlines(1.0, 1.0, lambda: 0.0),
        ConnectorMetrics(),
        kv_role,
    )


@pytest.mark.parametrize(
    ("kv_role", "hints", "is_sent"),
    [(BOTH, {}, True), (BOTH, {"load": False}, False), (dataclasses.replace(BOTH, loads=False), {}, False)],
)
def test_lookups_are_sent_when_a_request_enters_the_queue(kv_role: Role, hints: Any, is_sent: bool) -> None:
    remote = RemoteStore(1, lambda: 0.0, answer_s=0.01)
    scheduler = new_scheduler(kv_role, [SecondaryTier("peer", RemoteIndex(remote, 1 << 20))])
    request = new_request()
    request.kv_transfer_params = {"hybridkv_hints": hints}
    scheduler.track(request)
    num_sent = remote.num_lookups
    assert num_sent == (2 if is_sent else 0), "chunks of 8 tokens, of 20"
    scheduler.track(request)
    scheduler.matched_tokens(request, 0)
    assert remote.num_lookups == num_sent, "they are in flight"


def test_the_first_lookup_after_a_failed_load_is_deferred() -> None:
    """The engine then schedules waiting requests that hold blocks, such as sessions, before this one."""
    scheduler, request = new_scheduler(), new_request()
    assert scheduler.matched_tokens(request, 0) == 0
    scheduler._admission.fail(request.request_id, request.num_tokens)
    assert [scheduler.matched_tokens(request, 0) for _ in range(3)] == [None, 0, 0]


@pytest.mark.parametrize("computed_tokens", [0, BLOCK])
def test_blocks_that_another_connector_loads_lose_their_marks(computed_tokens: int) -> None:
    scheduler, request = new_scheduler(), new_request()
    corruption = scheduler._engine_corruption
    corruption._add(5)
    assert scheduler.matched_tokens(request, 0) == 0
    request.num_computed_tokens = computed_tokens
    scheduler.on_allocated(request, KVCacheBlocks(([KVCacheBlock(5)],)), 0)
    assert corruption.is_corrupt(5) is (computed_tokens > 0), "a session that continues keeps its blocks"


def first_key(tracked: TrackedRequest) -> bytes:
    return tracked.keys().key(0, 2 * BLOCK)


def test_after_a_reset_an_engine_shares_keys_only_with_itself() -> None:
    """The weights that an engine may have by then are in no file."""
    one, other = new_scheduler(), new_scheduler()
    waiting = one.track(new_request())
    old = first_key(waiting)
    assert old == first_key(other.track(new_request()))
    one.reset()
    new = first_key(waiting)
    assert new != old, "a waiting request is looked up and stored under the new keys"
    assert new == first_key(one.track(new_request()))
    other.reset()
    assert first_key(other.track(new_request())) not in (old, new)
    assert one._identity.namespace == other._identity.namespace


def lora_request(path: Path, name: str = "r", *, in_place: bool = False, adapter: str = "tuned") -> Request:
    path.mkdir(exist_ok=True)
    if not any(path.iterdir()):
        (path / "adapter_config.json").write_text("{}")
        (path / "adapter_model.safetensors").write_bytes(b"weights")
    lora = LoRARequest(adapter, 1, str(path), load_inplace=in_place)
    init_none_hash(engine_hash)
    hasher = get_request_block_hasher(BLOCK, engine_hash)
    return Request(name, [1] * 20, SamplingParams(max_tokens=9), None, lora_request=lora, block_hasher=hasher)


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", SOON_S)


@pytest.mark.usefixtures("_patient")
def test_an_adapter_is_checked_again_while_the_request_waits(tmp_path: Path) -> None:
    scheduler, request = new_scheduler(), lora_request(tmp_path / "a")
    adapters, requests = scheduler._identity.adapters, scheduler._requests
    tracked = requests.track(request)
    assert adapters.wait_until_idle(SOON_S)
    assert requests.identify(tracked)
    kept = tracked.request_keys
    assert requests.identify(tracked) and tracked.request_keys is kept
    tracked.stage = Holding(FOUND)
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"retrain")
    assert not requests.identify(tracked)
    assert (tracked.request_keys, tracked.stage) == (None, NEW_REQUEST)


@pytest.mark.usefixtures("_patient")
@pytest.mark.parametrize(
    ("other", "is_conflict_free"),
    [
        ({"path": "a", "in_place": True}, True),
        ({"path": "a"}, False),
        ({"path": "b", "in_place": True}, False),
        ({"path": "a", "in_place": True, "adapter": "other"}, False),
    ],
)
def test_a_request_that_loads_in_place_runs_alone_on_its_adapter(
    tmp_path: Path, other: dict[str, Any], is_conflict_free: bool
) -> None:
    scheduler = new_scheduler()
    requests, adapters = scheduler._requests, scheduler._identity.adapters
    tracked = requests.track(lora_request(tmp_path / "a", in_place=True))
    assert adapters.wait_until_idle(SOON_S)
    assert requests.identify(tracked)
    path = tmp_path / other.pop("path")
    requests.track(lora_request(path, "other", **other))
    assert requests.identify(tracked) is is_conflict_free


@pytest.mark.usefixtures("_patient")
@pytest.mark.parametrize(("computed_tokens", "is_known"), [(0, True), (BLOCK, False)])
def test_an_adapter_is_identified_at_allocation_if_not_looked_up(
    tmp_path: Path, computed_tokens: int, is_known: bool
) -> None:
    """An engine that only stores looks nothing up; after a request has begun it is too late."""
    scheduler, request = new_scheduler(Role(loads=False)), lora_request(tmp_path / "a")
    tracked = scheduler.track(request)
    assert scheduler._identity.adapters.wait_until_idle(SOON_S)
    request.num_computed_tokens = computed_tokens
    scheduler.on_allocated(request, SimpleNamespace(blocks=()), 0)  # type: ignore[arg-type]
    assert (tracked.request_keys is not None) is is_known


@pytest.mark.usefixtures("_patient")
def test_stores_that_end_together_cost_one_check_of_the_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, num_looks, look = new_scheduler(), [], module.signature
    requests, adapters = scheduler._requests, scheduler._identity.adapters
    states = [requests.track(lora_request(tmp_path / "a", name)) for name in "abc"]
    assert adapters.wait_until_idle(SOON_S) and all(requests.identify(tracked) for tracked in states)

    def counting(path: str) -> Signature:
        num_looks.append(path)
        return look(path)

    monkeypatch.setattr(module, "signature", counting)
    for expected in (1, 2):
        scheduler._stores._stores = {
            i: StoreInFlight(states[i].chain, [], [], 0, 1, states[i].adapter_version) for i in range(3)
        }
        scheduler._stores.on_ended({i: StoreOutcome(1) for i in range(3)})
        assert len(num_looks) == expected


@pytest.mark.parametrize("kv_role", [BOTH, Role(stores=False)], ids=["both", "loads"])
def test_corrupt_copies_are_tracked_without_stores_too(kv_role: Role) -> None:
    """A local load could copy from such a block, although the tier has the right bytes."""
    scheduler = new_scheduler(kv_role)
    scheduler.bind_block_pool(BlockPool(8, enable_caching=True, hash_block_size=BLOCK))
    scheduler.set_suspect_groups(SuspectGroups(frozenset({0})))
    output: Any = SimpleNamespace(
        preempted_req_ids=set(),
        finished_req_ids=set(),
        num_scheduled_tokens={"r": 1},
        kv_cache_block_copies=[(1, 3)],
        scheduled_new_reqs=[SimpleNamespace(req_id="r", num_computed_tokens=BLOCK - 1)],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], resumed_req_ids=set(), num_computed_tokens=[], new_block_ids=[]
        ),
        kv_connector_block_state=SimpleNamespace(boundary_state_offloads={}, block_ids={"r": ([3],)}),
        has_sync_kv_loads=False,
    )
    scheduler.plan_step(output)
    assert scheduler._engine_corruption.is_corrupt(3)


def test_a_preempted_request_stores_missing_chunks_again() -> None:
    scheduler, request = new_scheduler(), new_request()
    pool = BlockPool(8, enable_caching=True, hash_block_size=BLOCK)
    scheduler.bind_block_pool(pool)
    table = [block.block_id for block in pool.get_new_blocks(2)]
    assert scheduler.matched_tokens(request, 0) == 0

    def step(num_tokens: int, preempted: set[str]) -> tuple[Store, ...]:
        output: Any = SimpleNamespace(
            preempted_req_ids=preempted,
            finished_req_ids=set(),
            num_scheduled_tokens={"r": num_tokens} if num_tokens else {},
            kv_connector_block_state=SimpleNamespace(boundary_state_offloads={}, block_ids={"r": (table,)}),
            has_sync_kv_loads=False,
        )
        return scheduler.plan_step(output).stores

    (store,) = step(2 * BLOCK, set())
    scheduler._stores.on_ended({store.store_id: StoreOutcome(1, "lost", "io")})
    assert not step(2 * BLOCK, set()), "a running request does not store earlier chunks again"
    request.num_preemptions = 1
    assert not step(0, {"r"})
    assert step(2 * BLOCK, set())
