"""Fields of the engine's configuration that are not in the fingerprint, each with its reason; and facts that the
operator ignores.

An entry is the name of a class and of a field; it holds for every object of the class. `*` at the end matches the rest.
A field that is not listed is in the fingerprint. The engine's own lists of fields without effect on its hashes are not
used: they concern the reuse of compiled graphs, not of cached content.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hybridkv.connectors.config import ROOT
from hybridkv.connectors.errors import ConfigurationError, did_you_mean

_PLACE = "a place or a name, not content: the files themselves are digested"
_SERVING = "input and output of requests, outside the computation of tokens"
_SAMPLING = "how tokens are chosen; chosen tokens are in the key"
_TIMING = "times and concurrency"
_MEMORY = "how much memory is used for a purpose"
_NETWORK = "addresses of processes"
_PLACEMENT = "which process or device computes a share; the shares follow from tensor parallelism, which is a field"
_LOADING = "how fast weights are read, and through which memory"
_GRAPHS = "which launches are recorded and replayed; the kernels in them are the same"
_OBSERVED = "logs, measurements and traces"
_CACHING = "decides which content is cached, but not the content"
_OWN = "the fingerprint has a separate field for it"
_RUNTIME = "an object or a count of the running engine"
_RESOLVED = "resolved into fields that are in the fingerprint"

EXCLUDED_FIELDS: Mapping[str, str] = {
    # The model: names, tokens, answers.
    "ModelConfig.model": _PLACE,
    "ModelConfig.model_weights": _PLACE,
    "ModelConfig.hf_config_path": "the configuration read from there is in the fingerprint",
    "ModelConfig.config_format": "the configuration read in this format is in the fingerprint",
    "ModelConfig.hf_overrides": "the configuration after overrides is in the fingerprint",
    "ModelConfig.revision": "names files; they are digested, or named by the operator",
    "ModelConfig.tokenizer": "tokens are the key",
    "ModelConfig.tokenizer_mode": "tokens are the key",
    "ModelConfig.tokenizer_revision": "tokens are the key",
    "ModelConfig.skip_tokenizer_init": "tokens are the key",
    "ModelConfig.served_model_name": _SERVING,
    "ModelConfig.allowed_local_media_path": _SERVING,
    "ModelConfig.allowed_media_domains": _SERVING,
    "ModelConfig.hf_token": "a credential",
    "ModelConfig.max_model_len": "values that models derive from it are separate facts",
    "ModelConfig.spec_target_max_model_len": "resolved into the drafter's length",
    "ModelConfig.allow_deprecated_quantization": "a permission; the quantization in use is in the fingerprint",
    "ModelConfig.enforce_eager": _RESOLVED,
    "ModelConfig.seed": _SAMPLING,
    "ModelConfig.return_sampling_mask": _SAMPLING,
    "ModelConfig.max_logprobs": _SERVING,
    "ModelConfig.logprobs_mode": _SERVING,
    "ModelConfig.use_fp64_gumbel": _SAMPLING,
    "ModelConfig.logits_processors": _SAMPLING,
    "ModelConfig.generation_config": _SAMPLING,
    "ModelConfig.override_generation_config": _SAMPLING + "; the value that Llama 4 reads is a separate fact",
    "ModelConfig.io_processor_plugin": _SERVING,
    "ModelConfig.renderer_num_workers": _TIMING,
    "ModelConfig.enable_sleep_mode": _MEMORY,
    "ModelConfig.sleep_*": _MEMORY,
    "ModelConfig.enable_nccl_comm_suspend": _MEMORY,
    "ModelConfig.enable_cumem_allocator": _MEMORY,
    # Multimodal input: bounds, caches and transport. The settings of its processing are facts.
    "MultiModalConfig.limit_per_prompt": _SERVING,
    "MultiModalConfig.mm_processor_cache_gb": _MEMORY + "; if 0 leaves images without hashes, a nonce is a fact",
    "MultiModalConfig.mm_processor_cache_type": _CACHING,
    "MultiModalConfig.mm_hasher_algorithm": "hashes of input are in the key",
    "MultiModalConfig.mm_shm_cache_max_object_size_mb": _MEMORY,
    "MultiModalConfig.mm_encoder_tp_mode": _PLACEMENT,
    "MultiModalConfig.skip_mm_profiling": _MEMORY,
    "MultiModalConfig.mm_tensor_ipc": _NETWORK,
    "MultiModalConfig.mm_ipc_gpu_memory_gb": _MEMORY,
    # The cache: sizes, and which content is kept.
    "CacheConfig.block_size": "each stored group has the tokens of its blocks",
    "CacheConfig.user_specified_block_size": "each stored group has the tokens of its blocks",
    "CacheConfig._block_size_resolved": _RUNTIME,
    "CacheConfig.mamba_block_size": "each stored group has the tokens of its blocks",
    "CacheConfig.effective_attention_block_size": "each stored group has the tokens of its blocks",
    "CacheConfig.prefix_match_unit": "other hashes give other keys",
    "CacheConfig.hash_block_size": "other hashes give other keys",
    "CacheConfig.prefix_caching_hash_algo": _OWN,
    "CacheConfig.cache_hit_alignment_tokens": _CACHING,
    "CacheConfig.enable_prefix_caching": _CACHING,
    "CacheConfig.prefix_cache_retention_interval": _CACHING,
    "CacheConfig.enable_mamba_shared_prefix_checkpoint": _CACHING,
    "CacheConfig.gpu_memory_utilization": _MEMORY,
    "CacheConfig.num_gpu_blocks_override": _MEMORY,
    "CacheConfig.num_gpu_blocks": _MEMORY,
    "CacheConfig.num_cpu_blocks": _MEMORY,
    "CacheConfig.kv_cache_size_tokens": _MEMORY,
    "CacheConfig.kv_cache_max_concurrency": _MEMORY,
    "CacheConfig.kv_cache_memory_bytes": _MEMORY,
    "CacheConfig.mamba_page_size_padded": "padding is not stored",
    "CacheConfig.skip_page_size_padded": "padding is not stored",
    "CacheConfig.kv_offloading_*": "another store",
    # Parallelism beyond the number of tensor-parallel ranks. Numbers that must be 1 stay in.
    "ParallelConfig.tensor_parallel_size": _OWN,
    "ParallelConfig.world_size": _OWN,
    "ParallelConfig.rank": _OWN,
    "ParallelConfig.data_parallel_*": _PLACEMENT,
    "ParallelConfig._data_parallel_master_port_list": _NETWORK,
    "ParallelConfig._coord_store_port": _NETWORK,
    "ParallelConfig._api_process_count": _PLACEMENT,
    "ParallelConfig._api_process_rank": _PLACEMENT,
    "ParallelConfig._allow_auto_resolve_cp_interleave_size": _RUNTIME,
    "ParallelConfig.master_addr": _NETWORK,
    "ParallelConfig.master_port": _NETWORK,
    "ParallelConfig.node_rank": _PLACEMENT,
    "ParallelConfig.nnodes": _PLACEMENT,
    "ParallelConfig.dp_sync_interval": _TIMING,
    "ParallelConfig.enable_eplb": _PLACEMENT,
    "ParallelConfig.eplb_config": _PLACEMENT,
    "ParallelConfig.expert_placement_strategy": _PLACEMENT,
    "ParallelConfig.enable_elastic_ep": _PLACEMENT,
    "ParallelConfig.elastic_ep_max_dp_size": _PLACEMENT,
    "ParallelConfig.enable_ep_weight_filter": _LOADING,
    "ParallelConfig.enable_batch_sharded_sampling": _SAMPLING,
    "ParallelConfig.max_parallel_loading_workers": _LOADING,
    "ParallelConfig.disable_custom_all_reduce": "the order of one sum, which also depends on the hardware",
    "ParallelConfig.enable_shm_tensor_arena": _NETWORK,
    "ParallelConfig.enable_dbo": _TIMING,
    "ParallelConfig.ubatch_size": _TIMING,
    "ParallelConfig.dbo_*": _TIMING,
    "ParallelConfig.disable_nccl_for_dp_synchronization": _NETWORK,
    "ParallelConfig.ray_*": _NETWORK,
    "ParallelConfig.placement_group": _RUNTIME,
    "ParallelConfig.distributed_executor_backend": _NETWORK,
    "ParallelConfig.numa_*": _PLACEMENT,
    "ParallelConfig.assigned_physical_gpu_ids": _PLACEMENT,
    "ParallelConfig.distributed_timeout_seconds": _TIMING,
    "ParallelConfig.cpu_distributed_timeout_seconds": _TIMING,
    "ParallelConfig.enable_fault_tolerance": _TIMING,
    "ParallelConfig.fault_tolerance_config": _TIMING,
    # The scheduler decides when a token is computed, and in which batch.
    "SchedulerConfig.max_num_*": _TIMING,
    "SchedulerConfig.long_prefill_*": _TIMING,
    "SchedulerConfig.enable_chunked_prefill": _TIMING,
    "SchedulerConfig.encoder_cache_size": _MEMORY,
    "SchedulerConfig.policy": _TIMING,
    "SchedulerConfig.disable_chunked_mm_input": _TIMING,
    "SchedulerConfig.scheduler_reserve_full_isl": _MEMORY,
    "SchedulerConfig.watermark": _MEMORY,
    "SchedulerConfig.prefill_schedule_interval": _TIMING,
    "SchedulerConfig.async_scheduling": _TIMING,
    "SchedulerConfig.stream_interval": _SERVING,
    # Reading the weights. Their content is digested, and their conversion counts.
    "LoadConfig.download_dir": _PLACE,
    "LoadConfig.safetensors_prefetch_*": _LOADING,
    "LoadConfig.use_tqdm_on_load": _OBSERVED,
    "LoadConfig.pt_load_map_location": _LOADING,
    "VllmConfig.offload_config": "where weights are kept while they are not used",
    "EngramConfig.cpu_offload": "where weights are kept while they are not used",
    "EngramConfig.dp_shared_memory": _MEMORY,
    "EngramConfig.use_thp": _MEMORY,
    # Attention and kernels: the choice counts; sizes of buffers and searches for speed do not.
    "AttentionConfig.sparse_mla_prefill_workspace_factor": _MEMORY,
    "KernelConfig.enable_flashinfer_autotune": _TIMING,
    "KernelConfig.enable_rocm_segmented_attn_autotune": _TIMING,
    "KernelConfig.enable_cutedsl_warmup": _TIMING,
    "KernelConfig.enable_jit_warmup": _TIMING,
    # Compilation: fusions, backends and custom operators count.
    "CompilationConfig.debug_dump_path": _OBSERVED,
    "CompilationConfig.cache_dir": _PLACE,
    "CompilationConfig.local_cache_dir": _PLACE,
    "CompilationConfig.compile_cache_save_format": _PLACE,
    "CompilationConfig.splitting_ops": _GRAPHS,
    "CompilationConfig.cudagraph_*": _GRAPHS,
    "CompilationConfig.max_cudagraph_capture_size": _GRAPHS,
    "CompilationConfig.encoder_cudagraph_*": _GRAPHS,
    "CompilationConfig.decoder_replay_*": _GRAPHS,
    "CompilationConfig.compile_sizes": "sizes that are compiled separately, for speed",
    "CompilationConfig.compile_ranges_endpoints": "sizes that are compiled separately, for speed",
    "CompilationConfig.dynamic_shapes_config": "when compiled code is compiled again",
    "CompilationConfig.fast_moe_cold_start": "how layers are found at the start",
    "CompilationConfig.inductor_compile_config.post_grad_custom_post_pass": "made of passes, which are in",
    "PassConfig.rope_kvcache_fusion_max_token_num": "up to which size a fusion is used",
    "PassConfig.fi_allreduce_fusion_max_size_mb": "up to which size a fusion is used",
    "CompilationConfig.enabled_custom_ops": _RUNTIME,
    "CompilationConfig.disabled_custom_ops": _RUNTIME,
    "CompilationConfig.traced_files": _RUNTIME,
    "CompilationConfig.compilation_time": _RUNTIME,
    "CompilationConfig.encoder_compilation_time": _RUNTIME,
    "CompilationConfig.static_forward_context": _RUNTIME,
    "CompilationConfig.static_all_moe_layers": _RUNTIME,
    # Adapters: the content of each has its own digest; these are sizes.
    "LoRAConfig.max_loras": _MEMORY,
    "LoRAConfig.max_cpu_loras": _MEMORY,
    "LoRAConfig.specialize_active_lora": _GRAPHS,
    # The drafter: its weights and its configuration count; the acceptance of drafts does not.
    "SpeculativeConfig.model": _PLACE,
    "SpeculativeConfig.revision": "names files; they are digested, or named by the operator",
    "SpeculativeConfig.enforce_eager": _RESOLVED,
    "SpeculativeConfig.max_model_len": "resolved into the drafter's length",
    "SpeculativeConfig.draft_tensor_parallel_size": _RESOLVED,
    "SpeculativeConfig.tensor_parallel_size": "refused by the engine",
    "SpeculativeConfig.prompt_lookup_*": _SAMPLING,
    "SpeculativeConfig.suffix_decoding_*": _SAMPLING,
    "SpeculativeConfig.rejection_sample_method": _SAMPLING,
    "SpeculativeConfig.draft_sample_method": _SAMPLING,
    "SpeculativeConfig.synthetic_acceptance_*": _SAMPLING,
    "SpeculativeConfig.enable_adaptive_verification": _SAMPLING,
    "SpeculativeConfig.use_local_argmax_reduction": _SAMPLING,
    # The rest of the engine.
    "VllmConfig.quant_config": "made of settings that are in; its class is a fact; it also collects data at run time",
    "VllmConfig.kv_transfer_config": "stores, which do not change their content; the chunk has a separate field",
    "VllmConfig.kv_events_config": _OBSERVED,
    "VllmConfig.ec_manager_config": _CACHING,
    "VllmConfig.structured_outputs_config": _SAMPLING,
    "VllmConfig.watermark_config": _SAMPLING,
    "VllmConfig.reasoning_config": _SAMPLING,
    "VllmConfig.observability_config": _OBSERVED,
    "VllmConfig.logging_config": _OBSERVED,
    "VllmConfig.profiler_config": _OBSERVED,
    "VllmConfig.aux_output_config": _SERVING,
    "VllmConfig.instance_id": "names the engine",
    "VllmConfig.optimization_level": _RESOLVED,
    "VllmConfig.performance_mode": _TIMING,
    "VllmConfig.shutdown_timeout": _TIMING,
    "ECTransferConfig.engine_id": "names the engine",
    "ECTransferConfig.ec_buffer_*": _MEMORY,
    "ECTransferConfig.ec_role": _PLACEMENT,
    "ECTransferConfig.ec_ip": _NETWORK,
    "ECTransferConfig.ec_port": _NETWORK,
}
"""Fields of the newest vLLM that the tests run with engines, each with its reason."""

EXCLUDED_FIELDS_OF_OTHER_VERSIONS: Mapping[str, str] = {
    "ModelConfig.enable_return_routed_experts": _SERVING,
    "CacheConfig.user_specified_mamba_block_size": "each stored group has the tokens of its blocks",
    "CacheConfig.simple_cpu_offload_num_blocks": "another store",
    "ECTransferConfig.ec_parallel_size": _PLACEMENT,
    "ECTransferConfig.ec_rank": _PLACEMENT,
    "SpeculativeConfig.fly_*": _SAMPLING,
    "VllmConfig.watchdog_config": _OBSERVED,
}
"""Fields of vLLM 0.30, 0.31 and 0.33 that are not in `EXCLUDED_FIELDS`, each with its reason."""

EXCLUDED_MODEL_KEYS: Mapping[str, str] = {
    "_name_or_path": _PLACE,
    "transformers_version": "which library wrote the file",
}
"""Keys of a model configuration, at any depth, each with its reason."""

SECRET = frozenset(
    {
        "VllmConfig.additional_config",
        "LoadConfig.model_loader_extra_config",
        "ECTransferConfig.ec_connector_extra_config",
    }
)
"""Fields that are in the fingerprint only as digests, because an operator's free text may hold credentials."""


def is_named(entry: str, name: str) -> bool:
    """Whether an entry names a fact, or an object that contains the fact. `*` in an entry matches any text."""
    pattern = ".*".join(re.escape(piece) for piece in entry.split("*"))
    return re.fullmatch(rf"{pattern}([.\[].*)?", name, re.DOTALL) is not None


def without_ignored(facts: Mapping[str, str], ignores: Sequence[str]) -> dict[str, str]:
    """The facts without the facts that entries of `identity_ignores` name; see `is_named`.

    Raises:
        ConfigurationError: an entry names no fact.
    """
    for i, entry in enumerate(ignores):
        if not any(is_named(entry, name) for name in facts):
            raise ConfigurationError(
                f"{ROOT}.identity_ignores[{i}]",
                "the name of a fact in the identity of this engine's cache",
                repr(entry),
                did_you_mean(entry, sorted(facts)),
            )
    return {name: value for name, value in facts.items() if not any(is_named(entry, name) for entry in ignores)}
