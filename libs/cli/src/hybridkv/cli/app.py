"""The command `hybridkv` and its options. A command imports its own module when it runs, so that --help is fast."""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click

_SHOWN_EVERY = 100
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

    Exit status: 0 without problems, 1 for warnings only, 2 for an error, or for a warning that no connector is checked.
    """
    from hybridkv.cli.output import FAILED, as_problem, print_json, status_of
    from hybridkv.connectors import checking

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


@main.command(
    help="Plan an engine for MODEL: its groups and chunk, what each tier holds, and the value of --kv-transfer-config. "
    "No engine starts and no weights are read. OPTIONS of `vllm serve` may follow.",
    context_settings={"ignore_unknown_options": True},
    options_metavar="MODEL [OPTIONS] [OPTIONS OF VLLM SERVE]",
)
@click.argument("model", metavar="")
@click.option("--tiers", help="JSON list of tiers; without it and --config, 4 GiB of host memory.")
@click.option(
    "--config",
    "--kv-transfer-config",
    "config",
    help='File with the object of --kv-transfer-config, "-" for stdin, or the object itself.',
)
@click.option("--max-model-len", help="As for vllm serve.")
@click.option("--tensor-parallel-size", "-tp", help="As for vllm serve. The plan needs at most one GPU.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="")
def plan(
    model: str,
    tiers: str | None,
    config: str | None,
    max_model_len: str | None,
    tensor_parallel_size: str | None,
    as_json: bool,
    options: tuple[str, ...],
) -> None:
    """`model` is a directory with config.json, or a name, as for `vllm serve`.

    Exit status: 0, 1 for warnings, 2 if the plan fails or the engine would refuse.
    """
    from hybridkv.cli import planning
    from hybridkv.cli.output import FINE, WARNED, print_json
    from hybridkv.connectors import checking

    if model.startswith("-"):
        raise click.UsageError("MODEL comes first")
    if any(word == "--model" or word.startswith("--model=") for word in options):
        raise click.UsageError("the model is the first argument: leave --model out")
    if tiers is not None and config is not None:
        raise click.UsageError("--tiers and --config exclude each other: the object of --config has tiers")
    given = {"--max-model-len": max_model_len, "--tensor-parallel-size": tensor_parallel_size}
    engine_options = [*options, *(word for name, value in given.items() if value for word in (name, value))]
    with _exit_on_error():
        transfer = (
            planning.transfer_of(tiers) if config is None else checking.parse_transfer(_read(config), _name_of(config))
        )
        report = planning.plan(model, transfer, engine_options)
    if as_json:
        print_json(report)
    else:
        click.echo(planning.plan_text(report))
    sys.exit(WARNED if report.warnings else FINE)


@main.command(help="Simulate a trace of requests: hit rates by size of host memory, without an engine.")
@click.argument("trace", type=click.Path())
@click.option(
    "--plan", "plan_file", help='The document of `hybridkv plan --json`, for the sizes of the model; "-" for stdin.'
)
@click.option("--capacity", "capacities", multiple=True, help="Size of host memory, such as 16GiB; may be repeated.")
@click.option("--svg", type=click.Path(dir_okay=False), help="Write a chart to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def simulate(trace: str, plan_file: str | None, capacities: tuple[str, ...], svg: str | None, as_json: bool) -> None:
    """`trace` is a file of JSON lines, or a folder of them. Exit status: 0, or 2 if the trace cannot be simulated."""
    from hybridkv.cli import simulating
    from hybridkv.cli.output import print_json

    with _exit_on_error():
        sizes = None if plan_file is None else simulating.sizes_of_plan(_read(plan_file), _name_of(plan_file))
        report = simulating.simulate_trace(Path(trace), sizes, capacities)
        if svg is not None:
            _write(Path(svg), simulating.chart_of(report))
    if as_json:
        print_json(report)
    else:
        click.echo(simulating.simulation_text(report))


@main.command(help="Measure the time to first token of a running server: cold, again, and restored from the tiers.")
@click.argument("url")
@click.option("--model", help="A model that the server serves; by default its first one.")
@click.option("--tokens", type=click.IntRange(min=1), default=4096, show_default=True, help="Tokens of each prompt.")
@click.option("--prompts", type=click.IntRange(min=1), default=4, show_default=True, help="Prompts of each kind.")
@click.option("--seed", type=int, help="Seed of the prompts; by default each run has new ones.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def bench(url: str, model: str | None, tokens: int, prompts: int, seed: int | None, as_json: bool) -> None:
    """`url` is the address of a server of OpenAI's API. Exit status: 0, or 2 if the server cannot be measured."""
    from hybridkv.cli import measuring
    from hybridkv.cli.output import print_json

    with _exit_on_error():
        report = measuring.measure(url, model, tokens, prompts, lambda line: click.echo(line, err=True), seed)
    if as_json:
        print_json(report)
    else:
        click.echo(measuring.bench_text(report))


@main.command(help="Summarize the explain log of an engine: why requests did not hit, and what helps.")
@click.argument("log")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def explain(log: str, as_json: bool) -> None:
    """`log` is a file with lines of the logger vllm.hybridkv.explain, or "-" for stdin.

    Exit status: 0, or 2 if the log cannot be read or has no record.
    """
    from hybridkv.cli import explaining
    from hybridkv.cli.output import print_json

    with _exit_on_error(), sys.stdin if log == "-" else Path(log).open(encoding="utf-8", errors="replace") as lines:
        report = explaining.summarize(lines, _name_of(log))
    if as_json:
        print_json(report)
    else:
        click.echo(explaining.explain_text(report))


def _store_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of a command that opens an object store."""
    for option in (
        click.option("--secret-file", help="For a URL: the tier's secret_file."),
        click.option("--credentials-file", help="For a URL: the tier's credentials_file."),
        click.option("--region", help="For a URL: the bucket's region."),
        click.option("--endpoint", help="For a URL: the address of your own server."),
    ):
        command = option(command)
    return command


@main.command(help="Show the caches in the directory of a disk tier, or in an object store.")
@click.argument("place", metavar="PATH|URL")
@_store_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def inspect(place: str, as_json: bool, **options: str | None) -> None:
    """`place` is the `path` of a disk tier or the `url` of an object tier. An engine may have it open.

    Exit status: 0, or 2 if the place cannot be read.
    """
    from hybridkv.cli import stores
    from hybridkv.cli.output import print_json

    if _is_url(place):
        from hybridkv.cli import object_stores

        with _exit_on_error(), _progress("objects") as show:
            found = object_stores.inspect(object_stores.location_of(place, options), show)
        print_json(found) if as_json else click.echo(object_stores.object_store_text(found))
        return
    with _exit_on_error():
        reports = stores.inspect(str(Path(place).absolute()))
    if as_json:
        print_json(reports)
    else:
        click.echo(stores.namespaces_text(reports))


@main.command(help="Read each record in the directory of a disk tier, or in an object store, and compare its checksum.")
@click.argument("place", metavar="PATH|URL")
@_store_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def verify(place: str, as_json: bool, **options: str | None) -> None:
    """Exit status: 0, 1 if something is damaged or unreadable, or 2 if the directory or store cannot be used."""
    from hybridkv.cli import stores
    from hybridkv.cli.output import FINE, WARNED, print_json

    if _is_url(place):
        from hybridkv.cli import object_stores

        with _exit_on_error(), _progress("objects") as count:
            found = object_stores.verify(object_stores.location_of(place, options), count)
        print_json(found) if as_json else click.echo(object_stores.verify_text(found))
        sys.exit(FINE if found.is_intact else WARNED)
    is_shown = sys.stderr.isatty()

    def show(name: str, done: int, total: int) -> None:
        if is_shown and (done == total or not done % 100):
            click.echo(f"\r{name[:12]}: {done:,} of {total:,} records", nl=done == total, err=True)

    with _exit_on_error():
        reports = stores.verify(str(Path(place).absolute()), show)
    if as_json:
        print_json(reports)
    else:
        for report in reports:
            click.echo(f"{report.name[:12]}: {report.num_records:,} records, {report.num_damaged:,} damaged")
            if report.num_lost_segments:
                click.echo(f"  {report.num_lost_segments} segments are damaged, cleared or unreadable")
            if report.problem:
                click.echo(f"  cannot be read: {report.problem}")
            for damage in report.damages:
                click.echo(f"  {damage.key} on rank {damage.rank}: {damage.reason}: {damage.detail}")
    sys.exit(FINE if all(report.is_intact for report in reports) else WARNED)


@main.command(
    help="Show what can be deleted: leftovers of killed engines, unused content, content beyond a size. "
    "With --delete, delete it."
)
@click.argument("place", metavar="PATH|URL")
@click.option("--delete", is_flag=True, help="Delete. Without it nothing is changed.")
@click.option(
    "--older-than",
    "days",
    type=click.FloatRange(min=0),
    help="Also caches or objects that were not used for that many days.",
)
@click.option(
    "--capacity",
    help="For a URL: if the store is larger than this, such as 2TiB, also the least recently used objects, down to "
    "90 % of this size.",
)
@_store_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def gc(
    place: str, delete: bool, days: float | None, capacity: str | None, as_json: bool, **options: str | None
) -> None:
    """In a disk tier's directory, selects whole caches: those without a chunk and, with --older-than, those not opened
    for that time. Caches that an engine has open stay. In an object store, selects single objects.

    Exit status: 0, or 2 if the place cannot be used, another process sweeps it, or something cannot be deleted.
    """
    from hybridkv.cli import stores
    from hybridkv.cli.output import FAILED, print_json
    from hybridkv.connectors.config import parse_size

    if _is_url(place):
        from hybridkv.cli import object_stores

        with _exit_on_error(), _progress("objects") as show:
            capacity_bytes = None if capacity is None else parse_size("--capacity", capacity)
            rules = object_stores.rules_of(capacity_bytes, days, is_dry=not delete)
            swept = object_stores.sweep(object_stores.location_of(place, options), rules, show)
        print_json(swept) if as_json else click.echo(object_stores.sweep_text(swept, is_dry=not delete))
        sys.exit(FAILED if swept.num_failed else 0)
    if capacity is not None:
        raise click.UsageError("--capacity is for object stores: a disk tier keeps to its own capacity")
    where = str(Path(place).absolute())
    with _exit_on_error():
        reports = stores.garbage(where, days)
        left = stores.clear(where, [each.name for each in reports]) if delete else []
    if as_json:
        print_json({"caches": reports, "is_dry": not delete, "left": left})
    else:
        click.echo(stores.namespaces_text(reports) if reports else "nothing to delete")
        if reports:
            click.echo(
                f"deleted {len(reports) - len(left)} of {len(reports)}"
                if delete
                else "a dry run: nothing was deleted; --delete deletes them"
            )
    for name in left:
        click.echo(f"error: {name[:12]}: an engine has it open, or its files cannot be deleted", err=True)
    sys.exit(FAILED if left else 0)


@main.command(help="Delete caches in the directory of a disk tier, unless an engine has them open.")
@click.argument("path", type=click.Path())
@click.option("--namespace", "names", multiple=True, help="Beginning of a cache's name; without it, all caches.")
@click.option(
    "--older-than", "days", type=click.FloatRange(min=0), help="Only caches that were not opened for that many days."
)
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear(path: str, names: tuple[str, ...], days: float | None, yes: bool) -> None:
    """Exit status: 0, 1 if the operator does not confirm, or 2 if the directory cannot be used, or a cache is open or
    cannot be deleted."""
    from hybridkv.cli import stores
    from hybridkv.cli.output import FAILED, WARNED

    if "" in names:
        raise click.BadParameter("expected the beginning of a name, got nothing", param_hint="--namespace")
    where = str(Path(path).absolute())
    with _exit_on_error():
        reports = [each for each in stores.inspect(where) if not names or each.name.startswith(names)]
    if days is not None:
        reports = stores.not_opened_for(reports, days)
    click.echo(stores.namespaces_text(reports))
    if not reports:
        return
    if not yes and not click.confirm(f"Delete {len(reports)} of the caches in {where}?"):
        sys.exit(WARNED)
    with _exit_on_error():
        left = stores.clear(where, [each.name for each in reports])
    for name in left:
        click.echo(f"error: {name[:12]}: an engine has it open, or its files cannot be deleted", err=True)
    sys.exit(FAILED if left else 0)


@main.command(help="Check this machine, and the tiers of a --kv-transfer-config if one is given.")
@click.argument("config", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def doctor(config: str | None, as_json: bool) -> None:
    """Exit status: 0, 1 for warnings only, 2 if a check fails or an engine would refuse the configuration."""
    from hybridkv.cli import doctoring
    from hybridkv.cli.output import FAILED, FINE, WARNED, print_json
    from hybridkv.connectors import checking

    with _exit_on_error():
        raw = None if config is None else checking.parse_transfer(_read(config), _name_of(config))
        findings = list(doctoring.examine(raw))
    if as_json:
        print_json(findings)
    else:
        click.echo("\n".join(finding.text() for finding in findings))
    statuses = {finding.status for finding in findings}
    sys.exit(FAILED if "fail" in statuses else WARNED if "warn" in statuses else FINE)


def _is_url(place: str) -> bool:
    return "://" in place


@contextlib.contextmanager
def _progress(noun: str) -> Iterator[Callable[[int], None]]:
    """Yields a function that shows a growing number on a terminal."""
    shown = 0

    def show(number: int) -> None:
        nonlocal shown
        if number - shown >= _SHOWN_EVERY or number < shown:
            shown = number
            click.echo(f"\r{number:,} {noun} ", nl=False, err=True)

    try:
        yield show if sys.stderr.isatty() else lambda number: None
    finally:
        if shown:
            click.echo(err=True)


@contextlib.contextmanager
def _exit_on_error() -> Iterator[None]:
    """Prints an error of a setting or of the operating system, and exits with status 2."""
    from hybridkv.cli.output import FAILED, as_problem

    try:
        yield
    except (OSError, ValueError) as error:
        problem = as_problem(error)
        if problem is None:
            raise
        click.echo(problem.text(), err=True)
        sys.exit(FAILED)


def _write(path: Path, text: str) -> None:
    """Writes a file. `ReportError` if this fails."""
    from hybridkv.cli.output import ReportError
    from hybridkv.connectors.errors import SettingProblem

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        problem = SettingProblem("error", str(path), "a file that can be written", error.strerror or str(error))
        raise ReportError(problem) from error


def _read(config: str) -> str:
    """Text of a CONFIG argument."""
    if config == "-":
        return sys.stdin.read()
    return config if config.lstrip().startswith("{") else Path(config).read_text(encoding="utf-8")


def _name_of(config: str) -> str:
    """Name of a CONFIG argument, for errors."""
    return {"-": "stdin"}.get(config, "the argument" if config.lstrip().startswith("{") else config)
