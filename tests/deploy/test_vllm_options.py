"""vLLM's own parser takes the commands of the examples."""

from __future__ import annotations

import json

import pytest
from deployments import command_lines, option

COMMANDS = command_lines()


def test_vllm_knows_every_option_of_the_examples() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    for example, command in COMMANDS.items():
        parsed = parser.parse_args(command[2:])
        config = json.loads(option(command, "--kv-transfer-config"))
        assert parsed.model_tag == next(word for word in command if word.endswith("/MODEL")), example
        assert parsed.shutdown_timeout == 30, example
        assert parsed.kv_transfer_config.kv_load_failure_policy == "recompute", example
        assert parsed.kv_transfer_config.kv_connector_extra_config == config["kv_connector_extra_config"], example
    with pytest.raises(SystemExit):
        parser.parse_args([*command[2:], "--no-option"])
