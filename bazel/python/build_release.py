"""Collects a release: the distributions, their SHA256SUMS, and a bill of materials (CycloneDX 1.6 in JSON).

Arguments: the output directory, the contents of the wheelhouse, `--locks` with the lock files that have the tested
versions of other packages, `--directories` with the directories of wheels and source distributions.

The bill lists our distributions, their direct requirements, also those of extras, and the libraries that are linked
into the compiled part. Versions of other packages are those that the tests use; pip may install others. Their licences
come from the packages of this process.
"""

from __future__ import annotations

import argparse
import email
import email.message
import hashlib
import importlib.metadata
import json
import re
import shutil
import uuid
import zipfile
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CONTENTS = "CONTENTS.txt"
CHECKSUMS = "SHA256SUMS"
BILL = "sbom.cdx.json"
COMPILED = "hybridkv-native"
LINKED = {"nanobind": "BSD-3-Clause", "robin-map": "MIT", "libstdc++": "GPL-3.0-or-later WITH GCC-exception-3.1"}
"""The libraries compiled into the wheels of `hybridkv-native`. nanobind brings robin-map, the compiler libstdc++."""


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def locked_versions(locks: list[Path]) -> dict[str, str]:
    """The version of each package in lock files; the first file that has a package wins."""
    versions: dict[str, str] = {}
    for lock in locks:
        for name, version in re.findall(r"^([\w.-]+)==(\S+)", lock.read_text(), re.M):
            versions.setdefault(canonicalize_name(name), version)
    return versions


def metadata_of(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(path))


def licence_of(name: str) -> str | None:
    """The licence of an installed package as it states it in one line, or None."""
    try:
        metadata = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    stated = metadata.get("License-Expression") or metadata.get("License") or ""
    classified = [
        line.split(" :: ")[-1] for line in metadata.get_all("Classifier", []) if line.startswith("License ::")
    ]
    return stated if stated and "\n" not in stated and len(stated) < 60 else next(iter(classified), None)


def component(name: str, version: str | None, **more: Any) -> dict[str, Any]:
    url = f"pkg:pypi/{name}" + (f"@{version.replace('+', '%2B')}" if version else "")
    base = {"type": "library", "bom-ref": url, "name": name}
    return base | ({"version": version} if version else {}) | {"purl": url} | more


def licences(name: str) -> dict[str, Any]:
    licence = licence_of(name)
    return {"licenses": [{"license": {"name": licence}}]} if licence else {}


def bill(files: list[Path], locks: list[Path]) -> dict[str, Any]:
    """The bill of materials of the given wheels and source distributions."""
    versions = locked_versions(locks)
    ours: dict[str, dict[str, Any]] = {}
    requirements: dict[str, list[Requirement]] = {}
    for file in files:
        name = canonicalize_name(re.split(r"-\d", file.name)[0])
        distributed = {
            "type": "distribution",
            "url": file.name,
            "hashes": [{"alg": "SHA-256", "content": sha256(file)}],
        }
        if file.suffix == ".whl":
            metadata = metadata_of(file)
            requirements[name] = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
            described = component(
                name,
                str(metadata["Version"]),
                description=str(metadata["Summary"]),
                licenses=[{"expression": str(metadata["License-Expression"])}],
            )
            ours.setdefault(name, described | {"externalReferences": []})
        ours[name]["externalReferences"].append(distributed)

    others: dict[str, dict[str, Any]] = {}
    depends_on: dict[str, set[str]] = {each["bom-ref"]: set() for each in ours.values()}
    for name, required in requirements.items():
        for requirement in required:
            other = canonicalize_name(requirement.name)
            is_optional = requirement.marker is not None and "extra" in str(requirement.marker)
            if other in ours:
                depends_on[ours[name]["bom-ref"]].add(ours[other]["bom-ref"])
                continue
            scope = "optional" if is_optional else "required"
            entry = others.setdefault(other, component(other, versions.get(other), scope=scope, **licences(other)))
            if not is_optional:
                entry["scope"] = "required"
            depends_on[ours[name]["bom-ref"]].add(entry["bom-ref"])
    for name, licence in LINKED.items():
        linked = {"description": f"compiled into the wheels of {COMPILED}", "licenses": [{"expression": licence}]}
        is_locked = name in versions
        base = component(name, versions[name]) if is_locked else {"type": "library", "bom-ref": name, "name": name}
        others[name] = base | linked | {"scope": "required"}
        depends_on[ours[COMPILED]["bom-ref"]].add(others[name]["bom-ref"])

    root = {
        "type": "application",
        "bom-ref": "hybridkv",
        "name": "hybridkv",
        "version": ours["hybridkv-vllm"]["version"],
    }
    depends_on["hybridkv"] = {each["bom-ref"] for each in ours.values()}
    digest = hashlib.sha256("".join(f"{file.name} {sha256(file)}\n" for file in files).encode()).hexdigest()
    components = sorted([*ours.values(), *others.values()], key=lambda each: str(each["bom-ref"]))
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, digest)}",
        "version": 1,
        "metadata": {"component": root},
        "components": components,
        "dependencies": [{"ref": ref, "dependsOn": sorted(depends_on[ref])} for ref in sorted(depends_on)],
    }


def main(output: Path, contents: Path, locks: list[Path], directories: list[Path]) -> None:
    output.mkdir(exist_ok=True)
    for directory in directories:
        for file in directory.iterdir():
            if file.name != CONTENTS:
                shutil.copyfile(file, output / file.name)
    # A wheel has the metadata, and comes before the source distribution of its name.
    files = sorted(output.iterdir(), key=lambda file: (file.suffix != ".whl", file.name))
    (output / BILL).write_text(json.dumps(bill(files, locks), indent=1, sort_keys=True) + "\n")
    gaps = contents.read_text().split("\nLeft out:\n")[1]
    listed = "".join(f"  {name}\n" for name in sorted(file.name for file in files))
    (output / CONTENTS).write_text(f"Has:\n{listed}\nLeft out:\n{gaps}")
    sums = [f"{sha256(file)}  {file.name}\n" for file in sorted(output.iterdir()) if file.name != CHECKSUMS]
    (output / CHECKSUMS).write_text("".join(sums))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("contents", type=Path)
    parser.add_argument("--locks", type=Path, nargs="+", required=True)
    parser.add_argument("--directories", type=Path, nargs="+", required=True)
    options = parser.parse_args()
    main(options.output, options.contents, options.locks, options.directories)
