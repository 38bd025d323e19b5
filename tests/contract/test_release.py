"""A release is complete and describes itself correctly, and its source distributions rebuild its wheels."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import build_release
import pytest

COMPILED = "hybridkv_native"
"""A compiler on a user's machine produces other bytes than Bazel's; `//csrc/bindings:sdist_full_test` compiles it."""

PURE = [
    "canonical",
    "cli",
    "connectors",
    "hashing",
    "lmcache",
    "metrics",
    "peers",
    "planner",
    "tiers",
    "vllm",
    "transfer",
]


def release() -> Path:
    return Path(os.environ["HYBRIDKV_RELEASE"]).resolve()


def distributions() -> list[Path]:
    return sorted(file for file in release().iterdir() if file.name.endswith((".whl", ".tar.gz")))


@pytest.fixture(scope="module")
def bill() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((release() / build_release.BILL).read_text())
    return loaded


def test_each_distribution_has_a_wheel_and_sources() -> None:
    wheels = {file.name.split("-")[0] for file in distributions() if file.suffix == ".whl"}
    sources = {file.name.split("-")[0] for file in distributions() if file.suffix == ".gz"}
    assert wheels == sources
    assert {"hybridkv_vllm", "hybridkv_tiers", COMPILED} <= wheels


def test_the_checksums_are_those_of_all_files() -> None:
    lines = (release() / build_release.CHECKSUMS).read_text().splitlines()
    expected = {line.split("  ")[1]: line.split("  ")[0] for line in lines}
    files = [file for file in release().iterdir() if file.name != build_release.CHECKSUMS]
    assert expected == {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_the_contents_list_all_distributions() -> None:
    has = (release() / build_release.CONTENTS).read_text().split("\nLeft out:\n")[0].splitlines()[1:]
    assert [line.strip() for line in has] == [file.name for file in distributions()]


def test_the_bill_of_materials_has_each_file_with_its_checksum(bill: dict[str, Any]) -> None:
    listed = [reference for each in bill["components"] for reference in each.get("externalReferences", [])]
    found = {reference["url"]: reference["hashes"][0]["content"] for reference in listed}
    assert found == {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in distributions()}


def test_the_bill_of_materials_has_required_and_linked_packages(bill: dict[str, Any]) -> None:
    components = {each["name"]: each for each in bill["components"]}
    scopes = {name: each["scope"] for name, each in components.items() if "scope" in each}
    assert scopes["numpy"] == scopes["msgspec"] == "required"
    assert scopes["obstore"] == scopes["nixl"] == scopes["torch"] == "optional"
    assert all("licenses" in each for name, each in components.items() if scopes.get(name) != "optional")
    depends_on = {each["ref"]: each["dependsOn"] for each in bill["dependencies"]}
    native = depends_on[components["hybridkv-native"]["bom-ref"]]
    assert native == sorted(components[name]["bom-ref"] for name in build_release.LINKED)
    assert components["hybridkv-native"]["bom-ref"] in depends_on[components["hybridkv-tiers"]["bom-ref"]]
    refs = {each["bom-ref"] for each in bill["components"]}
    assert {ref for each in depends_on.values() for ref in each} <= refs


def test_the_same_distributions_give_the_same_release(tmp_path: Path) -> None:
    locks = [Path(lock) for lock in os.environ["HYBRIDKV_LOCKS"].split()]
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    # In another order, from other directories.
    for position, file in enumerate(reversed(distributions())):
        shutil.copyfile(file, folders[position % 2] / file.name)
    again = tmp_path / "again"
    build_release.main(again, release() / build_release.CONTENTS, locks, folders)
    names = {file.name for file in release().iterdir()}
    assert {file.name for file in again.iterdir()} == names
    assert [name for name in sorted(names) if (again / name).read_bytes() != (release() / name).read_bytes()] == []


@pytest.mark.parametrize("name", PURE)
def test_a_source_distribution_rebuilds_the_wheel_of_the_release(name: str, tmp_path: Path) -> None:
    [archive] = release().glob(f"hybridkv_{name}-*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(tmp_path, filter="data")
    [project] = tmp_path.iterdir()
    environment = os.environ | {"SOURCE_DATE_EPOCH": "315532800"}
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    built = subprocess.run(build, cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    [wheel] = (project / "dist").glob("*.whl")
    assert wheel.read_bytes() == (release() / wheel.name).read_bytes()
