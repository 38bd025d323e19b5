"""KV cache groups of an engine that is not started, from vLLM's own configuration, model class and grouping.

The model is built on torch's meta device, so a model of any size takes almost no memory. Nothing is computed and no GPU
memory is measured, so the number of the engine's blocks is not known. This module imports vLLM when a function runs.
"""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from hybridkv.cli.output import ReportError
from hybridkv.connectors.errors import SettingProblem

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

AVAILABLE_BYTES = 1 << 50
"""Size of the KV memory that vLLM's grouping gets as an input. The groups do not depend on it."""


class PlannedEngine(NamedTuple):
    """Configuration of an engine, as its scheduler would see it after the model is loaded.

    Args:
        vllm_config: final configuration.
        kv_cache_config: groups of the engine. The number of blocks has no meaning.
        version: version of vLLM.
        device: device type that vLLM chose.
    """

    vllm_config: VllmConfig
    kv_cache_config: KVCacheConfig
    version: str
    device: str


def plan_engine(model: str, transfer: Mapping[str, Any], options: Sequence[str]) -> PlannedEngine:
    """Configures an engine as `vllm serve` does, and builds its groups as the engine's core does.

    Args:
        model: directory or name, as for `vllm serve`.
        transfer: the object of --kv-transfer-config.
        options: further options of `vllm serve`.

    Raises:
        ReportError: vLLM is not installed or has another version, an option is unknown, vLLM refuses the model or the
            options, or the engine has a drafter.
    """
    if find_spec("vllm") is None:
        raise ReportError(
            SettingProblem(
                "error",
                "vllm",
                "an installed vLLM, as it decides the groups",
                "none in this Python environment",
                "install hybridkv-cli where the engine is, or vllm here: pip install vllm",
            )
        )
    if not _has_config(model):
        raise ReportError(
            SettingProblem(
                "error", model, "a directory with config.json, or a name for vllm serve", "no config.json there", ""
            )
        )
    # vLLM reads these variables when it is imported. It must not log to stdout, which has only the report.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    with _as_report_error(model):
        import vllm

        vllm_config = _configure(model, transfer, options)
        if vllm_config.speculative_config is not None:
            raise ReportError(
                SettingProblem(
                    "error",
                    "speculative_config",
                    "an engine without a drafter: the layers of drafters are not planned",
                    str(getattr(vllm_config.speculative_config, "method", "one")),
                    "leave speculative_config out; an engine with a drafter logs its groups at its start",
                )
            )
        kv_cache_config = _groups(vllm_config)
    return PlannedEngine(vllm_config, kv_cache_config, vllm.__version__, vllm_config.device_config.device_type)


def _has_config(model: str) -> bool:
    """False if the model is a path without config.json. True for a name, which vLLM looks up."""
    path = Path(model)
    return (path / "config.json").is_file() or not (path.exists() or model.startswith((".", "/", "~")))


@contextlib.contextmanager
def _as_report_error(model: str) -> Iterator[None]:
    """Turns an error of vLLM or of a library below it into a `ReportError`. Does not change a `ConfigurationError`."""
    try:
        yield
    except ReportError:
        raise
    except Exception as error:  # vLLM has no common class of errors
        if getattr(error, "expected", None) is not None:
            raise
        if "meta" in str(error) and "tensor" in str(error):
            expected, hint = "a model that can be built without memory", "start an engine to see its groups"
        else:
            expected, hint = "a model and options that vLLM accepts", "an engine would stop with this error too"
        raise ReportError(SettingProblem("error", model, expected, _words(error), hint)) from error


def _words(error: Exception) -> str:
    """Class name and text of an error. For an error of pydantic, only its messages."""
    errors = getattr(error, "errors", None)
    text = "; ".join(each["msg"] for each in errors()) if callable(errors) else str(error)
    return f"{type(error).__name__}: {text}"


def _configure(model: str, transfer: Mapping[str, Any], options: Sequence[str]) -> VllmConfig:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.plugins import load_general_plugins
    from vllm.usage.usage_lib import UsageContext

    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        from vllm.utils import FlexibleArgumentParser

    from hybridkv.connectors.vllm import register

    load_general_plugins()
    register()  # also if the plugin is not installed

    class OptionParser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ReportError(SettingProblem("error", "options", "options of vllm serve for its engine", message, ""))

    parser = AsyncEngineArgs.add_cli_args(OptionParser(add_help=False))
    arguments = AsyncEngineArgs.from_cli_args(parser.parse_args([*options, "--model", model]))
    arguments.kv_transfer_config = _transfer_config(transfer)
    return arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)


def _transfer_config(transfer: Mapping[str, Any]) -> Any:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(**transfer)


def _groups(vllm_config: VllmConfig) -> KVCacheConfig:
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.v1.engine.core import EngineCore

    initialize = getattr(EngineCore, "_initialize_kv_caches", None)
    if initialize is None or not hasattr(current_platform, "update_block_size_for_backend"):
        raise _other_version()
    with set_current_vllm_config(vllm_config), _process_groups(vllm_config):
        _build_model(vllm_config)
        current_platform.update_block_size_for_backend(vllm_config)
        core: Any = SimpleNamespace(
            model_executor=_PlannedExecutor(vllm_config), collective_rpc=lambda *args, **kwargs: []
        )
        found: KVCacheConfig = initialize(core, vllm_config)
    if not hasattr(found, "kv_cache_groups"):
        raise _other_version()
    return found


def _other_version() -> ReportError:
    import vllm

    hint = "an engine of this version logs its groups at its start"
    return ReportError(SettingProblem("error", "vllm", "0.32, with which plan is tested", vllm.__version__, hint))


def _build_model(vllm_config: VllmConfig) -> None:
    """Builds the model, so that its layers register themselves in the configuration.

    Some layers read or check a number of a tensor while they are built. A meta tensor has no numbers; here each number
    reads as 1 (true). This does not change the groups, because they depend only on shapes and settings.
    """
    import torch
    from torch.overrides import TorchFunctionMode
    from vllm.model_executor.model_loader.utils import initialize_model

    names = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
    reads = {getattr(torch.Tensor, name) for name in names}

    class ReadAsOne(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in reads and args[0].is_meta:
                args = (torch.ones_like(args[0], device="cpu"), *args[1:])
            return func(*args, **(kwargs or {}))

    before = torch.get_default_dtype()
    torch.set_default_dtype(vllm_config.model_config.dtype)
    try:
        with torch.device("meta"), ReadAsOne():
            initialize_model(vllm_config)
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _process_groups(vllm_config: VllmConfig) -> Iterator[None]:
    """Process groups of rank 0, in a single process. Layers read the size of a group and never communicate."""
    from vllm.config import ParallelConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized():
        raise RuntimeError("an engine runs in this process")
    alone = copy.copy(vllm_config)
    alone.parallel_config = ParallelConfig()
    size = vllm_config.parallel_config.tensor_parallel_size
    with tempfile.TemporaryDirectory() as folder:
        try:
            with set_current_vllm_config(alone):
                parallel_state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
                parallel_state.initialize_model_parallel(1, 1)
            group = parallel_state.get_tp_group()
            group.world_size, group.ranks = size, list(range(size))
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


class _PlannedExecutor:
    """Replaces vLLM's executor in the code of the engine's core that finds the groups. Loads no weights."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._worker: Any = SimpleNamespace(vllm_config=vllm_config, shared_kv_cache_layers={})

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        if getattr(self._worker.vllm_config, "use_v2_model_runner", False):
            from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

            return [get_kv_cache_spec(self._worker.vllm_config)]
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        return [GPUModelRunner.get_kv_cache_spec(self._worker)]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        from vllm.v1.worker.worker_base import WorkerBase

        return [WorkerBase.get_supported_kv_cache_layouts(self._worker)]

    def set_kv_cache_layout(self, layout_name: str) -> None:
        """Does nothing: the engine's core has set the layout in the shared configuration already."""

    def determine_available_memory(self) -> list[int]:
        return [AVAILABLE_BYTES]

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        """Does nothing: there is no memory."""

    def compile_or_warm_up_model(self) -> None:
        """Does nothing: nothing is computed."""
