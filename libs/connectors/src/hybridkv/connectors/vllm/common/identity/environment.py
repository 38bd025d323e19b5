"""Facts of the environment: every variable that may change computed content, by name. Values are digested.

A set variable is a fact if it matches `CANDIDATE_VARIABLES` and is not in `EXCLUDED_VARIABLES`. Candidates are all
variables of the engine, and variables of its libraries that may choose instructions, precisions or kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from fnmatch import fnmatchcase

from hybridkv.connectors.vllm.common.identity.fact_text import digested

ENVIRONMENT = "environment"
CANDIDATE_VARIABLES = (
    "VLLM_*",
    "ATEN_*",
    "ONEDNN_*",
    "DNNL_*",
    "MKL_*",
    "TORCH_*",
    "TORCHINDUCTOR_*",
    "TORCHDYNAMO_*",
    "PYTORCH_*",
    "NVIDIA_TF32_OVERRIDE",
    "CUBLAS_*",
    "CUBLASLT_*",
    "CUDNN_*",
    "TRITON_*",
    "FLASHINFER_*",
    "FLASH_ATTENTION_*",
    "DG_*",
    "AITER_*",
    "MIOPEN_*",
    "ROCBLAS_*",
    "HIPBLASLT_*",
    "HSA_OVERRIDE_GFX_VERSION",
)
"""Patterns of variables that are facts unless `EXCLUDED_VARIABLES` lists them."""

_BUILD = "read when the engine is built or packaged"
_PLACE = "a place for files that can be created again"
_NETWORK = "addresses of processes, and transport of bytes between them"
_LOG = "logs, measurements and traces"
_SERVING = "input and output of requests, outside the computation of tokens"
_FETCHING = "how input is fetched and bounded; the input itself is hashed into the key"
_TIMING = "times and concurrency"
_MEMORY = "how much memory is used for a purpose"
_LAUNCH = "how processes are started, and which device each has"
_SECRET = "a credential, or where one is used"
_SAMPLING = "how tokens are chosen; chosen tokens are in the key"
_STORES = "other stores, and how they move bytes"
_COMPILER = "where and how compiled code is kept; the configuration determines its content"
_SHIPPED = "part of an engine's package; the engine's version is a fact"

EXCLUDED_VARIABLES: Mapping[str, str] = {
    # General variables that the engine reads.
    "MAX_JOBS": _BUILD,
    "NVCC_THREADS": _BUILD,
    "CMAKE_BUILD_TYPE": _BUILD,
    "VERBOSE": _BUILD,
    "CUDA_HOME": _BUILD,
    "LD_LIBRARY_PATH": "where libraries are",
    "LOCAL_RANK": _LAUNCH,
    "CUDA_VISIBLE_DEVICES": _LAUNCH,
    "S3_*": _SECRET,
    "NO_COLOR": _LOG,
    "FORCE_COLOR": _LOG,
    "MOONCAKE_*": _STORES,
    "VLLM_DIST_IDENT": _NETWORK,
    # Packages and places.
    "VLLM_TARGET_DEVICE": _BUILD,
    "VLLM_MAIN_CUDA_VERSION": _BUILD,
    "VLLM_USE_PRECOMPILED*": _BUILD,
    "VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX": _BUILD,
    "VLLM_SKIP_VERSION_SUFFIX": _BUILD,
    "VLLM_DOCKER_BUILD_CONTEXT": _BUILD,
    "VLLM_BUILD_*": _SHIPPED,
    "VLLM_IMAGE_TAG": _SHIPPED,
    "VLLM_HAS_FLASHINFER_CUBIN": _SHIPPED,
    "VLLM_NCCL_SO_PATH": _PLACE,
    "VLLM_NCCL_INCLUDE_PATH": _PLACE,
    "VLLM_CUDART_SO_PATH": _PLACE,
    "VLLM_CUDA_COMPATIBILITY_PATH": _PLACE,
    "VLLM_RUST_FRONTEND_PATH": _PLACE,
    "VLLM_CONFIG_ROOT": _PLACE,
    "VLLM_CACHE_ROOT": _PLACE,
    "VLLM_XLA_CACHE_PATH": _PLACE,
    "VLLM_ASSETS_CACHE*": _PLACE,
    "VLLM_MEDIA_CACHE*": _PLACE,
    "VLLM_LORA_RESOLVER_*": "adapters are identified by their own digests",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "adapters are identified by their own digests",
    "VLLM_USE_MODELSCOPE": "where weights come from; they are digested, or named by the operator",
    "VLLM_MODEL_REDIRECT_PATH": "where weights come from; they are digested, or named by the operator",
    "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": _PLACE,
    "VLLM_ENABLE_STARTUP_PLAN": _MEMORY,
    # Processes and networks.
    "VLLM_HOST_IP": _NETWORK,
    "VLLM_LOOPBACK_IP": _NETWORK,
    "VLLM_PORT": _NETWORK,
    "VLLM_RPC_BASE_PATH": _NETWORK,
    "VLLM_DP_*": _NETWORK,
    "VLLM_RAY_*": _LAUNCH,
    "VLLM_USE_RAY_*": _LAUNCH,
    "VLLM_DISTRIBUTED_USE_SPLIT_GROUP": _NETWORK,
    "VLLM_NIXL_SIDE_CHANNEL_*": _NETWORK,
    "VLLM_EC_SIDE_CHANNEL_*": _NETWORK,
    "VLLM_P2P_*": _STORES,
    "VLLM_SKIP_P2P_CHECK": _NETWORK,
    "VLLM_MOONCAKE_*": _STORES,
    "VLLM_USE_SIMPLE_KV_OFFLOAD": _STORES,
    "VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS": _STORES,
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": _STORES,
    "VLLM_GPU_NIC_PCIE_MAPPING": _NETWORK,
    "VLLM_NIC_SELECTION_VARS": _NETWORK,
    "VLLM_WORKER_MULTIPROC_METHOD": _LAUNCH,
    "VLLM_ENABLE_V1_MULTIPROCESSING": _LAUNCH,
    "VLLM_PROCESS_NAME_PREFIX": _LAUNCH,
    "VLLM_CPU_OMP_THREADS_BIND": _LAUNCH,
    "VLLM_CPU_NUM_OF_RESERVED_CPU": _LAUNCH,
    "VLLM_ELASTIC_EP_*": _LAUNCH,
    "VLLM_RINGBUFFER_WARNING_INTERVAL": _LOG,
    "VLLM_MQ_MAX_CHUNK_BYTES_MB": _NETWORK,
    "VLLM_MSGPACK_ZERO_COPY_THRESHOLD": _NETWORK,
    "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME": _NETWORK,
    "VLLM_ALLOW_INSECURE_SERIALIZATION": _NETWORK,
    "VLLM_OMP_NUM_THREADS_SET_BY_VLLM": _LAUNCH,
    # Variables that Kubernetes sets for each service. A service may have the name of a library. See also
    # `_is_service_address`.
    "*_SERVICE_HOST": _NETWORK,
    "*_SERVICE_PORT": _NETWORK,
    "*_SERVICE_PORT_*": _NETWORK,
    "*_PORT_[0-9]*_TCP*": _NETWORK,
    "*_PORT_[0-9]*_UDP*": _NETWORK,
    "*_PORT_[0-9]*_SCTP*": _NETWORK,
    # Time and memory.
    "VLLM_ENGINE_READY_TIMEOUT_S": _TIMING,
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": _TIMING,
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": _TIMING,
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": _TIMING,
    "VLLM_USE_SPINLOOP_EXT": _TIMING,
    "VLLM_CPU_KVCACHE_SPACE": _MEMORY,
    "VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE": _MEMORY,
    "VLLM_FASTSAFETENSORS_QUEUE_SIZE": _MEMORY,
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": _MEMORY,
    "VLLM_WEIGHT_OFFLOADING_*": _MEMORY,
    "VLLM_WSL2_ENABLE_PIN_MEMORY": _MEMORY,
    "VLLM_ENABLE_CUDAGRAPH_GC": _MEMORY,
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "a permission; values that models derive from the length are separate facts",
    # Requests and answers.
    "VLLM_API_KEY": _SECRET,
    "VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT": _SERVING,
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": _SERVING,
    "VLLM_MAX_N_SEQUENCES": _SERVING,
    "VLLM_MAX_COMPLETION_PROMPTS": _SERVING,
    "VLLM_MAX_STOP_STRINGS": _SERVING,
    "VLLM_MAX_NUM_BAD_WORDS": _SERVING,
    "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS": _SERVING,
    "VLLM_USE_FASTOKENS": "tokens are the key",
    "VLLM_USE_RUST_*": _SERVING,
    "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": _SERVING,
    "VLLM_TOOL_*": _SERVING,
    "VLLM_ENFORCE_STRICT_TOOL_CALLING": _SERVING,
    "VLLM_ENABLE_RESPONSES_API_STORE": _SERVING,
    "VLLM_ENABLE_COHERE_API": _SERVING,
    "VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT": _SERVING,
    "VLLM_GPT_OSS_*": _SERVING,
    "VLLM_SYSTEM_START_DATE": _SERVING,
    "VLLM_SERVER_DEV_MODE": _SERVING,
    "VLLM_SKIP_MODEL_NAME_VALIDATION": _SERVING,
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": _SERVING,
    "VLLM_XGRAMMAR_CACHE_MB": _SAMPLING,
    "VLLM_REGEX_COMPILATION_TIMEOUT_S": _SAMPLING,
    "VLLM_V1_USE_OUTLINES_CACHE": _SAMPLING,
    "VLLM_USE_FLASHINFER_SAMPLER": _SAMPLING,
    "VLLM_XPU_USE_SAMPLER_KERNEL": _SAMPLING,
    "VLLM_RAISE_ON_LOGIT_NANS": _SERVING,
    "VLLM_IMAGE_FETCH_TIMEOUT": _FETCHING,
    "VLLM_VIDEO_FETCH_TIMEOUT": _FETCHING,
    "VLLM_AUDIO_FETCH_TIMEOUT": _FETCHING,
    "VLLM_MEDIA_FETCH_MAX_RETRIES": _FETCHING,
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": _FETCHING,
    "VLLM_MEDIA_LOADING_THREAD_COUNT": _FETCHING,
    "VLLM_MEDIA_CONNECTOR": _FETCHING,
    "VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB": _FETCHING,
    "VLLM_MAX_AUDIO_*": _FETCHING,
    "VLLM_MAX_EMBED_DECODE_BYTES": _FETCHING,
    "VLLM_MAX_IMAGE_PIXELS": _FETCHING,
    # Logs.
    "VLLM_LOGGING_*": _LOG,
    "VLLM_CONFIGURE_LOGGING": _LOG,
    "VLLM_LOG_*": _LOG,
    "VLLM_DISABLE_LOG_LOGO": _LOG,
    "VLLM_DEBUG_*": _LOG,
    "VLLM_PATTERN_MATCH_DEBUG": _LOG,
    "VLLM_GC_DEBUG": _LOG,
    "VLLM_TRACE_FUNCTION": _LOG,
    "VLLM_GPU_SYNC_CHECK": _LOG,
    "VLLM_XLA_CHECK_RECOMPILATION": _LOG,
    "VLLM_CUSTOM_SCOPES_FOR_PROFILING": _LOG,
    "VLLM_NVTX_SCOPES_FOR_PROFILING": _LOG,
    "VLLM_USAGE_*": _LOG,
    "VLLM_NO_USAGE_STATS": _LOG,
    "VLLM_DO_NOT_TRACK": _LOG,
    # Compiled code.
    "VLLM_DISABLE_COMPILE_CACHE": _COMPILER,
    "VLLM_COMPILE_CACHE_SAVE_FORMAT": _COMPILER,
    "VLLM_USE_AOT_COMPILE": _COMPILER,
    "VLLM_FORCE_AOT_LOAD": _COMPILER,
    "VLLM_USE_MEGA_AOT_ARTIFACT": _COMPILER,
    "VLLM_TRITON_JIT_WARMUP_NUM_THREADS": _COMPILER,
    "VLLM_DEEP_GEMM_WARMUP": _COMPILER,
    # Libraries that the engine uses.
    "*_CACHE_DIR": _PLACE,
    "TRITON_HOME": _PLACE,
    "TRITON_DUMP_DIR": _PLACE,
    "TRITON_*_PATH": _PLACE,
    "TORCH_HOME": _PLACE,
    "TORCH_LOGS*": _LOG,
    "TORCH_CPP_LOG_LEVEL": _LOG,
    "TORCH_SHOW_CPP_STACKTRACES": _LOG,
    "TORCH_TRACE": _LOG,
    "TORCH_COMPILE_DEBUG": _LOG,
    "TORCH_DISTRIBUTED_*": _LOG,
    "TORCH_NCCL_*": _NETWORK,
    "TORCH_GLOO_*": _NETWORK,
    "TORCH_CUDA_ARCH_LIST": _BUILD,
    "TORCH_EXTENSIONS_DIR": _PLACE,
    "TORCHINDUCTOR_COMPILE_THREADS": _COMPILER,
    "TORCHINDUCTOR_WORKER_START": _COMPILER,
    "PYTORCH_ALLOC_CONF": _MEMORY,
    "PYTORCH_*_ALLOC_CONF": _MEMORY,
    "PYTORCH_NVML_BASED_CUDA_CHECK": _LAUNCH,
    "PYTORCH_VERSION": _SHIPPED,
    "PYTORCH_BUILD_*": _SHIPPED,
    "MKL_NUM_THREADS": _LAUNCH,
    "MKL_DYNAMIC": _LAUNCH,
    "MKL_VERBOSE": _LOG,
    "ONEDNN_VERBOSE*": _LOG,
    "DNNL_VERBOSE*": _LOG,
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": _MEMORY,
    "CUDNN_LOG*": _LOG,
    "CUBLAS_LOG*": _LOG,
    "CUBLASLT_LOG*": _LOG,
    "FLASHINFER_LOG*": _LOG,
    "FLASHINFER_WORKSPACE_BASE": _PLACE,
    "AITER_LOG*": _LOG,
    "MIOPEN_LOG*": _LOG,
    "MIOPEN_ENABLE_LOGGING*": _LOG,
    "MIOPEN_USER_DB_PATH": _PLACE,
}
"""Variables that are not in the fingerprint: reasons by name or pattern. `*` matches any characters."""


def environment_facts(environ: Mapping[str, str]) -> dict[str, str]:
    """Digest of every variable in `environ` that may change content, by fact name."""
    return {
        f"{ENVIRONMENT}.{name}": digested(value)
        for name, value in sorted(environ.items())
        if is_candidate_variable(name)
        and variable_exclusion_reason(name) is None
        and not _is_service_address(name, value)
    }


def _is_service_address(name: str, value: str) -> bool:
    """Whether the variable is `<SERVICE>_PORT` with an address, which Kubernetes sets for each service."""
    return name.endswith("_PORT") and value.startswith(("tcp://", "udp://", "sctp://"))


def is_candidate_variable(name: str) -> bool:
    """Whether a variable matches `CANDIDATE_VARIABLES`."""
    return any(fnmatchcase(name, pattern) for pattern in CANDIDATE_VARIABLES)


@functools.cache
def variable_exclusion_reason(name: str) -> str | None:
    """Reason why `EXCLUDED_VARIABLES` lists a variable; None if the variable is not listed."""
    if name in EXCLUDED_VARIABLES:
        return EXCLUDED_VARIABLES[name]
    for pattern, reason in EXCLUDED_VARIABLES.items():
        if "*" in pattern and fnmatchcase(name, pattern):
            return reason
    return None
