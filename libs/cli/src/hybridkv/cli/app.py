"""The command `hybridkv` and its options. A command imports its own module when it runs, so that --help is fast."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import click

_NOT_INSTALLED = "unknown: hybridkv-cli is not installed"


def _version() -> str:
    try:
        return importlib.metadata.version("hybridkv-cli")
    except importlib.metadata.PackageNotFoundError:
        return _NOT_INSTALLED


@click.group(
    name="hybridkv",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    help="KV cache offload for hybrid models on vLLM.",
)
@click.version_option(_version(), prog_name="hybridkv")
def main() -> None:
    """Entry point."""


@main.command(help="Check a --kv-transfer-config by the rules of the engine, without an engine.")
@click.argument("config")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def check(config: str, as_json: bool) -> None:
    """`config` is a file with the JSON object of --kv-transfer-config, "-" for stdin, or the object itself.

    Exit status: 0 if there is nothing to say, 1 for warnings alone, 2 for an error.
    """
    from hybridkv.cli import checking
    from hybridkv.cli.output import FAILED, as_problem, print_json, status_of

    try:
        report = checking.check(checking.parse_transfer(_read(config), _name_of(config)))
    except (OSError, ValueError) as error:
        problem = as_problem(error)
        if problem is None:
            raise
        report = checking.CheckReport([], [problem])
    if as_json:
        print_json(report)
    else:
        for problem in report.problems:
            click.echo(problem.text(), err=True)
        if not report.problems:
            click.echo(f"no problem found: {', '.join(report.connectors)}")
    sys.exit(status_of(report.problems) if report.connectors or not report.problems else FAILED)


@main.command(help="Summarize the explain log of an engine: why requests did not hit, and what helps.")
@click.argument("log")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def explain(log: str, as_json: bool) -> None:
    """`log` is a file with lines of the logger vllm.hybridkv.explain, or "-" for stdin.

    Exit status: 0, or 2 if the log cannot be read or has no record.
    """
    from hybridkv.cli import explaining
    from hybridkv.cli.output import FAILED, as_problem, print_json

    try:
        with sys.stdin if log == "-" else Path(log).open(encoding="utf-8", errors="replace") as lines:
            report = explaining.summarize(lines, _name_of(log))
    except (OSError, ValueError) as error:
        problem = as_problem(error)
        if problem is None:
            raise
        click.echo(problem.text(), err=True)
        sys.exit(FAILED)
    if as_json:
        print_json(report)
    else:
        click.echo(explaining.text_of(report))


def _read(config: str) -> str:
    """Text of a CONFIG argument."""
    if config == "-":
        return sys.stdin.read()
    return config if config.lstrip().startswith("{") else Path(config).read_text(encoding="utf-8")


def _name_of(config: str) -> str:
    """Name of a CONFIG argument in errors."""
    return {"-": "stdin"}.get(config, "the argument" if config.lstrip().startswith("{") else config)
