"""Further versions of vLLM for the contract tests and the oracle: source archives on PyPI.

`tools/vllm_versions.py add VERSION` adds one.
"""

VLLM_VERSIONS = {
    "0.30.0": {
        "url": "https://files.pythonhosted.org/packages/3d/88/fc455e2e8cd81764a81027a7464f775a7d613e6c95ac00e23b47824bf10d/vllm-0.30.0.tar.gz",
        "sha256": "5f8f4e890c042ffa1c3e103f81c35e2d96f60a0a175ac43a4adbae7006bef62b",
    },
    "0.31.0": {
        "url": "https://files.pythonhosted.org/packages/96/89/11460eaeb96e636f716657d460a6daebc7ddbcd631dd6799f232cae25771/vllm-0.31.0.tar.gz",
        "sha256": "dde46f1efbe846e5bd0c5c4ec6ec71842c42254c7ff3d9bebb2a57028715d380",
    },
    "0.33.0": {
        "url": "https://files.pythonhosted.org/packages/f7/25/aa5684e9c59d6fc75f78926b7f15e8d9adc7de2d9e6e7575b80776ad8169/vllm-0.33.0.tar.gz",
        "sha256": "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
    },
}

# Tests, or modules of tests, that a version skips because it lacks this feature.
VLLM_SKIPS = {
    "0.30.0": {
        "test_a_window_that_is_recomputed_is_refused": "bounded replay",
        "test_chunks_have_the_same_keys_with_and_without_tails": "tails",
        "test_content_after_a_dropped_step_is_served_to_no_request": "dropped steps",
        "test_every_single_fault_is_found_with_all_features": "tails",
        "test_one_memory_pool_is_used_and_two_are_an_error": "memory pools of connectors",
        "test_tails": "tails",
        "test_tails_are_off_unless_they_are_configured": "tails",
        "test_tails_use_the_prefix_match_unit_of_the_engine_for_states": "tails",
        "test_the_child_that_loads_answers_calls_about_the_load": "groups that are not zeroed",
        "test_the_fake_runner_calls_a_step_in_the_order_of_vllm": "runner 2 that saves last",
        "test_vllm_refuses_sleep_mode_only_for_connectors_without_support": "sleep mode",
    },
    "0.31.0": {
        "test_chunks_have_the_same_keys_with_and_without_tails": "tails",
        "test_every_single_fault_is_found_with_all_features": "tails",
        "test_tails": "tails",
        "test_tails_are_off_unless_they_are_configured": "tails",
        "test_tails_use_the_prefix_match_unit_of_the_engine_for_states": "tails",
        "test_the_child_that_loads_answers_calls_about_the_load": "groups that are not zeroed",
        "test_the_fake_runner_calls_a_step_in_the_order_of_vllm": "runner 2 that saves last",
        "test_vllm_refuses_sleep_mode_only_for_connectors_without_support": "sleep mode",
    },
    "0.32.0": {
        "test_the_fake_runner_calls_a_step_in_the_order_of_vllm": "runner 2 that saves last",
        "test_vllm_refuses_sleep_mode_only_for_connectors_without_support": "sleep mode",
    },
    "0.33.0": {},
}

def vllm_repository(version):
    """Name of the repository with the Python files of a version."""
    return "vllm_" + version.replace(".", "_")
