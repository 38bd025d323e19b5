"""Inspects, verifies and sweeps object stores."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hybridkv.cli.output import ReportError
from hybridkv.connectors.config import format_size
from hybridkv.connectors.errors import SettingProblem
from hybridkv.peers.errors import PeersConfigurationError
from hybridkv.peers.wire import read_secret
from hybridkv.tiers.object import SECRET_PURPOSE, ObjectOptions, StoreLocation
from hybridkv.tiers.object.directory_store import path_of
from hybridkv.tiers.object.inspection import ObjectStoreReport, ObjectVerifier, ObjectVerifyReport, inspect_objects
from hybridkv.tiers.object.store import clock_ahead_s, describe, is_directory
from hybridkv.tiers.object.sweeping import Sweep, SweepReport, SweepRules, sweep_lock

if TYPE_CHECKING:
    from hybridkv.tiers.object.store import Store

SHORT_NAME_LENGTH = 12
DAY_S = 86_400.0


def location_of(url: str, options: Mapping[str, str | None]) -> StoreLocation:
    """Location of a store.

    Args:
        url: `url` of the tier.
        options: "endpoint", "region", "credentials_file" and "secret_file" of the tier.

    Raises:
        ReportError: the content of a file cannot be used, or the URL has credentials.
        OSError: the file with the credentials cannot be read.
    """
    if "@" in url.partition("://")[2].partition("/")[0]:  # the URL is not in the error, because it may contain a secret
        hint = "put them into --credentials-file, or the environment"
        raise ReportError(SettingProblem("error", "url", "a URL without credentials", "one with @", hint))
    settings: dict[str, str] = {}
    credentials, secret_file = options.get("credentials_file"), options.get("secret_file")
    if credentials is not None:
        try:
            settings = msgspec.json.decode(Path(credentials).read_bytes(), type=dict[str, str])
        except msgspec.DecodeError as error:
            problem = SettingProblem("error", "--credentials-file", "a JSON object of strings", credentials, "")
            raise ReportError(problem) from error
    settings |= {name: value for name in ("endpoint", "region") if (value := options.get(name)) is not None}
    try:
        secret = b"" if secret_file is None else read_secret(secret_file).derive(SECRET_PURPOSE)
    except PeersConfigurationError as error:
        problem = SettingProblem("error", "--secret-file", error.expected, str(error.got), error.hint)
        raise ReportError(problem) from error
    return StoreLocation(url, settings, secret)


def _open(location: StoreLocation) -> Store:
    """Opens a store. Does not create a directory.

    Raises:
        TierConfigurationError: the URL, a setting or the directory cannot be used.
        ReportError: the directory does not exist.
    """
    if is_directory(location.url) and not Path(path_of(location.url)).is_dir():
        raise ReportError(SettingProblem("error", "url", "a directory that exists", location.url, ""))
    return location.open(ObjectOptions())


def _failed(location: StoreLocation, error: Exception) -> ReportError:
    return ReportError(SettingProblem("error", "url", "a store that can be used", location.url, describe(error)))


def inspect(location: StoreLocation, on_progress: Callable[[int], None]) -> ObjectStoreReport:
    """Contents of a store.

    Raises:
        TierConfigurationError: a setting is wrong.
        ReportError: the store's directory does not exist, or the store cannot be listed.
    """
    store = _open(location)
    try:
        return inspect_objects(store, on_progress)
    except Exception as error:  # of obstore and of the libraries below it
        raise _failed(location, error) from error


def verify(location: StoreLocation, on_progress: Callable[[int], None]) -> ObjectVerifyReport:
    """Reads every object.

    Raises:
        TierConfigurationError: a setting is wrong.
        ReportError: the store's directory does not exist, or the store cannot be listed.
    """
    store = _open(location)
    try:
        return ObjectVerifier(store, location.seals, on_progress).run()
    except Exception as error:  # of obstore and of the libraries below it
        raise _failed(location, error) from error


def rules_of(capacity_bytes: int | None, days: float | None, *, is_dry: bool) -> SweepRules:
    """Rules of `hybridkv gc`."""
    return SweepRules(capacity_bytes, None if days is None else days * DAY_S, is_dry=is_dry)


def sweep(location: StoreLocation, rules: SweepRules, on_progress: Callable[[int], None]) -> SweepReport:
    """Deletes objects by the rules. A dry run writes nothing, so it compares ages with this host's clock.

    Raises:
        TierConfigurationError: a setting is wrong.
        ReportError: the store's directory does not exist, the store cannot be listed, or another process sweeps the
            directory.
    """
    store = _open(location)
    try:
        if rules.is_dry:
            return Sweep(store, rules, time.time(), on_progress).run()
        with sweep_lock(store) as is_locked:
            if is_locked:
                now_s = time.time() + clock_ahead_s(store, "doctor")
                return Sweep(store, rules, now_s, on_progress).run()
    except Exception as error:  # of obstore and of the libraries below it
        raise _failed(location, error) from error
    holder = f"{location.url}/sweep.lock is locked"
    hint = "an engine with a capacity, or another gc, sweeps it now: try again"
    raise ReportError(SettingProblem("error", "url", "a directory that no other process sweeps", holder, hint))


def object_store_text(report: ObjectStoreReport) -> str:
    """Text of `inspect`, for people."""
    lines = []
    for cache in report.caches:
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(cache.newest_s)) if cache.newest_s else "unknown"
        size = format_size(cache.pack_bytes + cache.manifest_bytes)
        lines.append(f"{cache.name[:SHORT_NAME_LENGTH]}  last written or renewed {written}  {size}")
        lines.append(
            f"  {cache.num_packs:,} packs, {format_size(cache.pack_bytes)}; {cache.num_manifests:,} manifests, "
            f"{format_size(cache.manifest_bytes)}"
        )
        if cache.oldest_s:
            oldest_days = max(0.0, time.time() - cache.oldest_s) / DAY_S
            lines.append(f"  oldest object: {oldest_days:.1f} days")
        if cache.cache:
            lines.append(f"  current epoch {cache.epoch} of cache {cache.cache[:SHORT_NAME_LENGTH]}")
        if cache.num_leftovers:
            lines.append(f"  {cache.num_leftovers} checks and unfinished objects")
    if not lines:
        lines.append("no cache")
    if report.num_other:
        lines.append(f"{report.num_other:,} other objects, {format_size(report.other_bytes)}, not hybridkv's")
    return "\n".join(lines)


def verify_text(report: ObjectVerifyReport) -> str:
    """Text of `verify`, for people."""
    lines = [f"{report.num_records:,} chunks, {report.num_manifests:,} manifests, {report.num_damaged:,} damaged"]
    for number, words in (
        (report.num_incomplete, "manifests list a pack that is gone"),
        (report.num_other_secret, "are whole, but sealed with another secret: give --secret-file"),
        (report.num_unread, "objects could not be read"),
    ):
        if number:
            lines.append(f"  {number:,} {words}")
    for damage in report.damages:
        at = "" if damage.offset < 0 else f" at {damage.offset}"
        lines.append(f"  {damage.name}{at}: {damage.reason}: {damage.detail}")
    return "\n".join(lines)


def sweep_text(report: SweepReport, *, is_dry: bool) -> str:
    """Text of `sweep`, for people."""
    lines = [f"{report.num_objects:,} objects, {format_size(report.num_bytes)}"]
    lines += [
        f"  {str(reason).replace('_', ' ')}: {number:,} objects, {format_size(num_bytes)}"
        for reason, (number, num_bytes) in report.reasons.items()
    ]
    if not report.reasons:
        lines.append("nothing to delete")
    elif is_dry:
        lines.append("a dry run: nothing was deleted; --delete deletes them")
    else:
        lines.append(f"deleted {report.num_deleted - report.num_failed:,} objects")
    if report.num_failed:
        lines.append(f"{report.num_failed:,} objects could not be deleted")
    if report.num_other:
        lines.append(f"{report.num_other:,} other objects are not hybridkv's and stay")
    if not report.is_complete:
        lines.append("packs without a manifest were kept: a manifest could not be read")
    return "\n".join(lines)
