"""Checks of a --kv-transfer-config: errors from the connectors' own decoders, and warnings of probable mistakes.

`hybridkv check` and the connectors use these checks. The checks import no vLLM, open no tier and read no model. So an
engine may still refuse a checked configuration, because of vLLM's version, a tier or the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from hybridkv.connectors import config as offload
from hybridkv.connectors.config import ROOT, OffloadConfig, format_size, name_of
from hybridkv.connectors.errors import ConfigurationError, SettingProblem, did_you_mean
from hybridkv.connectors.vllm import CONNECTOR, LMCACHE_CONNECTOR, MODULES, MULTI_CONNECTOR, PEER_CONNECTOR
from hybridkv.connectors.vllm.lmcache import config as lmcache
from hybridkv.connectors.vllm.multi.config import MULTI_CONNECTORS, decode_multi_config
from hybridkv.connectors.vllm.nixl import config as nixl

TRANSFER_KEYS: Final = (
    "kv_connector",
    "engine_id",
    "kv_buffer_device",
    "kv_role",
    "kv_port",
    "kv_connector_extra_config",
    "kv_connector_module_path",
    "enable_permute_local_kv",
    "kv_load_failure_policy",
)
"""Fields of vLLM's KVTransferConfig (vllm/config/kv_transfer.py, 0.32)."""
ROLES: Final = ("kv_both", "kv_producer", "kv_consumer")
POLICIES: Final = ("recompute", "fail")


class CheckReport(msgspec.Struct, frozen=True):
    """Result of a check.

    Args:
        connectors: class names of the connectors that were checked; only hybridkv's connectors are.
        problems: errors, then warnings.
    """

    connectors: list[str]
    problems: list[SettingProblem]


def parse_transfer(text: str, source: str) -> dict[str, Any]:
    """Decodes the object of --kv-transfer-config.

    Args:
        text: JSON.
        source: name of the text, for errors.

    Raises:
        ConfigurationError: the text is not a JSON object.
    """
    hint = '{"kv_connector": "HybridOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": {...}}'
    try:
        raw = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigurationError(source, "JSON", str(error), hint) from None
    if not isinstance(raw, dict):
        raise ConfigurationError(source, "a JSON object", type(raw).__name__, hint)
    return raw


def check(raw: Mapping[str, Any], transfer_keys: Sequence[str] = TRANSFER_KEYS) -> CheckReport:
    """Checks a decoded --kv-transfer-config.

    Args:
        raw: the configuration.
        transfer_keys: keys of the engine's KVTransferConfig.
    """
    problems = [*_transfer_errors(raw, transfer_keys)]
    connectors: list[str] = []
    name, extra = raw.get("kv_connector"), raw.get(ROOT, {})
    if isinstance(name, str) and isinstance(extra, Mapping):
        for path, connector, transfer in connectors_of(raw, problems, transfer_keys):
            connectors.append(connector)
            problems += _connector_problems(path, connector, transfer)
    policy = raw.get("kv_load_failure_policy", "fail")
    if policy == "fail" and connectors and raw.get("kv_role") != "kv_producer":  # a producer loads nothing
        problems.append(
            SettingProblem(
                "warning",
                "kv_load_failure_policy",
                '"recompute"',
                '"fail", vLLM\'s default',
                'with "fail" a request ends with an error when its load fails; with "recompute" it is computed',
            )
        )
    return CheckReport(connectors, sorted(problems, key=lambda problem: problem.severity))


def require_valid(connector: str, extra: Mapping[str, Any], transfer_keys: Sequence[str] = TRANSFER_KEYS) -> None:
    """Checks one connector's `kv_connector_extra_config`, and those of its children.

    Args:
        connector: class name of the connector.
        extra: its extra configuration.
        transfer_keys: keys of the engine's KVTransferConfig.

    Raises:
        ConfigurationError: the first error, with its path from the top of the configuration.
    """
    raise_first(check({"kv_connector": connector, "kv_role": ROLES[0], ROOT: extra}, transfer_keys).problems)


def raise_first(problems: Sequence[SettingProblem]) -> None:
    """Raises the first problem if it is an error.

    Raises:
        ConfigurationError: the problem.
    """
    if problems and problems[0].severity == "error":
        first = problems[0]
        raise ConfigurationError(first.path, first.expected, first.got, first.hint)


def _transfer_errors(raw: Mapping[str, Any], transfer_keys: Sequence[str]) -> Iterator[SettingProblem]:
    """Errors in the fields of vLLM's KVTransferConfig."""
    for key in raw:
        if key not in transfer_keys:
            is_extra_key = key in OffloadConfig.__struct_fields__
            hint = f'put it into "{ROOT}"' if is_extra_key else did_you_mean(str(key), transfer_keys)
            yield SettingProblem("error", str(key), "a known key", "an unknown one", hint)
    known = ", ".join(MODULES)
    if not isinstance(raw.get("kv_connector"), str):
        yield SettingProblem("error", "kv_connector", f"one of {known}", repr(raw.get("kv_connector", "nothing")), "")
    for key, values, is_needed in (("kv_role", ROLES, True), ("kv_load_failure_policy", POLICIES, False)):
        if (key in raw or is_needed) and raw.get(key) not in values:
            expected = "one of " + ", ".join(f'"{value}"' for value in values)
            yield SettingProblem("error", key, expected, repr(raw.get(key, "nothing")), f'"{values[0]}" is usual')
    if not isinstance(raw.get(ROOT, {}), Mapping):
        yield SettingProblem(
            "error", ROOT, "an object", repr(raw[ROOT]), 'for example {"tiers": [{"type": "ram", "capacity": "4GiB"}]}'
        )


def connectors_of(
    raw: Mapping[str, Any], problems: list[SettingProblem], transfer_keys: Sequence[str] = TRANSFER_KEYS
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yields path prefix, class name and KVTransferConfig of each connector of hybridkv, children included.

    Args:
        raw: a --kv-transfer-config with a text for `kv_connector` and an object for `kv_connector_extra_config`.
        problems: receives the error in the settings of HybridMultiConnector, after which no connector is yielded; for
            a connector of another project, receives a warning.
        transfer_keys: keys of the engine's KVTransferConfig.
    """
    name, extra = str(raw.get("kv_connector")), raw.get(ROOT) or {}
    if name == MULTI_CONNECTOR:
        inherited = {key: raw[key] for key in ("engine_id", "kv_role", "kv_load_failure_policy") if key in raw}
        try:
            children = decode_multi_config(extra, inherited, transfer_keys).children
        except ConfigurationError as error:
            problems.append(SettingProblem.of(error))
            return
        yield f"{ROOT}.", name, raw
        entries = [(child.connector, child.transfer) for child in children]
    elif name in MULTI_CONNECTORS:
        found = extra.get("connectors", [])
        listed = [entry for entry in found if isinstance(entry, Mapping)] if isinstance(found, Sequence) else []
        entries = [(str(entry.get("kv_connector")), entry) for entry in listed]
    elif name in MODULES:
        yield f"{ROOT}.", name, raw
        return
    else:
        expected = "a connector of hybridkv; the settings of other connectors are not checked"
        hint = did_you_mean(name, list(MODULES))
        problems.append(SettingProblem("warning", "kv_connector", expected, repr(name), hint))
        return
    for i, (connector, transfer) in enumerate(entries):
        path, extra = f"{ROOT}.connectors[{i}].", transfer.get(ROOT)
        if connector in MODULES and extra is not None and not isinstance(extra, Mapping):
            hint = "leave it out if it is empty"
            problems.append(SettingProblem("error", path + ROOT, "an object", repr(extra), hint))
            continue
        if connector == MULTI_CONNECTOR:  # a child of vLLM's MultiConnector
            found_in_child: list[SettingProblem] = []
            for child_path, name_in_child, child_transfer in connectors_of(transfer, found_in_child, transfer_keys):
                yield path + child_path, name_in_child, child_transfer
            problems += [msgspec.structs.replace(problem, path=path + problem.path) for problem in found_in_child]
        elif connector in MODULES:
            yield f"{path}{ROOT}.", connector, transfer


def _connector_problems(path: str, connector: str, transfer: Mapping[str, Any]) -> list[SettingProblem]:
    extra = transfer.get(ROOT) or {}
    try:
        if connector == CONNECTOR:
            config = offload.decode_config(extra)
            return [_with_full_path(path, problem) for problem in _warnings(config, transfer.get("kv_role"))]
        if connector == PEER_CONNECTOR:
            nixl.decode_config(extra)
        elif connector == LMCACHE_CONNECTOR:
            lmcache.decode_config(extra)
    except ConfigurationError as error:
        return [_with_full_path(path, SettingProblem.of(error))]
    return []


def _with_full_path(path: str, problem: SettingProblem) -> SettingProblem:
    """Problem with a path from the top of the configuration."""
    if problem.path == "kv_role":  # a field of the connector, not of its extra configuration
        return msgspec.structs.replace(problem, path=path.removesuffix(f"{ROOT}.") + problem.path)
    return msgspec.structs.replace(problem, path=path + problem.path.removeprefix(f"{ROOT}."))


def _warnings(config: OffloadConfig, role: object) -> Iterator[SettingProblem]:
    """Warnings of probable mistakes: settings that an engine accepts."""
    names = [name_of(tier) for tier in config.tiers]
    if config.disk is not None and config.disk.capacity <= config.ram.capacity:
        yield SettingProblem(
            "warning",
            f"{config.path_of('disk')}.capacity",
            f"more than the {format_size(config.ram.capacity)} of host memory",
            format_size(config.disk.capacity),
            "the disk holds chunks that host memory has evicted; a disk this small helps only after a restart",
        )
    if "disk" in names and "object" in names and names.index("object") < names.index("disk"):
        yield SettingProblem(
            "warning",
            config.path_of("object"),
            "the disk before the object store",
            "the object store before the disk",
            "a chunk is loaded from the first tier that has it: list the disk first",
        )
    if not config.secondary and role in ("kv_producer", "kv_consumer"):
        effect = "no engine loads its chunks" if role == "kv_producer" else "it has no chunks to load"
        yield SettingProblem(
            "warning",
            "kv_role",
            "kv_both, or a tier that outlives the engine",
            repr(role),
            f"host memory belongs to one engine, so {effect}",
        )
