"""With KV tensors on a real GPU no wrong byte is read: vLLM's scheduler, our connector, both ways of copying."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from conftest import unavailable
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("vllm", reason="vLLM is not installed")

from engine_copies import find_engine_copies  # noqa: E402

from hybridkv.connectors.vllm import CONNECTOR, register  # noqa: E402
from hybridkv.connectors.vllm.common.copies.devices import (  # noqa: E402
    EngineDevice,
    EngineGpuDevice,
    GpuDevice,
    NativeGpuDevice,
)
from oracle.mirrored import MirroredEngine  # noqa: E402
from oracle.mixes import NAMED  # noqa: E402
from oracle.profile import profile  # noqa: E402
from oracle.scenarios import Tally, run_on, scenarios, with_connector  # noqa: E402
from oracle.settings import Connector  # noqa: E402

if TYPE_CHECKING:
    from oracle.mixes import Mix
    from oracle.scenarios import Scenario


@pytest.fixture(autouse=True, scope="module")
def _a_gpu() -> None:
    if not torch.cuda.is_available():
        unavailable(f"torch {torch.__version__} sees no GPU")
    register()


def native() -> GpuDevice:
    return NativeGpuDevice()


def engine() -> GpuDevice:
    return EngineGpuDevice(EngineDevice(find_engine_copies()[1]))


@pytest.mark.parametrize("way", [native, engine])
@pytest.mark.parametrize("mix", [mix for mix in NAMED if not mix.misleads], ids=lambda mix: mix.name)
def test_offload_never_corrupts(mix: Mix, way: Callable[[], GpuDevice]) -> None:
    tally, gpu = Tally(), way()

    @profile(32)
    @given(scenarios(mix, st.booleans(), draws_ahead=True), st.sampled_from(("async", "async", "sync")))
    def check(scenario: Scenario, load: str) -> None:
        tiers = [{"type": "ram", "capacity": "16MiB"}]
        extra_config = {"chunk_tokens": mix.alignment_tokens, "tiers": tiers, "load": load}
        with_ours = with_connector(scenario, Connector(CONNECTOR, extra_config))
        of_this_gpu = MirroredEngine(mix, with_ours.settings, gpu)
        run_on(of_this_gpu, with_ours)
        tally.add(of_this_gpu)

    check()
    assert tally.with_restored > tally.scenarios // 8, tally
