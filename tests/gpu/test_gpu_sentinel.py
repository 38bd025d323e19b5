"""The sentinel finds every gpu_test and says which did not run; a lease gives each test its own GPUs. Needs no GPU."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest
from bazel.gpu import gpu_lease, gpu_sentinel
from bazel.gpu.gpu_sentinel import GpuTest, Machine


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "BUILD.bazel").write_text('load("x", "gpu_test")\npytest_test(name = "cpu")\n')
    (tmp_path / "a" / "BUILD.bazel").write_text('gpu_test(\n    name = "one",\n    srcs = ["t.py"],\n)\n')
    (tmp_path / "a" / "b" / "BUILD.bazel").write_text(
        'gpu_test(name = "two", srcs = [], gpus = 2)\n'
        'gpu_test(name = "compiled", srcs = [], target_compatible_with = ["//gpu:nvcc", "//gpu:torch"])\n'
    )
    return tmp_path


def reasons(suite: ET.Element) -> dict[str | None, str | None]:
    """Of what was skipped, by target."""
    return {case.get("name"): found.get("message") for case in suite for found in case.iter("skipped")}


def test_every_gpu_test_is_found(tree: Path) -> None:
    assert gpu_sentinel.gpu_tests(tree) == [
        GpuTest("//a:one", 1),
        GpuTest("//a/b:two", 2),
        GpuTest("//a/b:compiled", 1, ("//gpu:nvcc", "//gpu:torch")),
    ]


@pytest.mark.parametrize(("gpus", "skipped"), [(0, 3), (1, 1), (2, 0)])
def test_what_has_too_few_gpus_is_reported_as_skipped(tree: Path, gpus: int, skipped: int) -> None:
    machine = Machine(gpus, "" if gpus else "no nvidia-smi in $PATH", {"//gpu:nvcc": "", "//gpu:torch": ""})
    text, suite = gpu_sentinel.report(gpu_sentinel.gpu_tests(tree), machine)
    assert text.startswith(f"{skipped} of 3 GPU test targets did NOT run here")
    assert list(reasons(suite)) == {0: ["//a:one", "//a/b:two", "//a/b:compiled"], 1: ["//a/b:two"], 2: []}[gpus]
    assert suite.get("skipped") == str(skipped)
    assert all(f"  {label} {reason}" in text for label, reason in reasons(suite).items())


def test_what_lacks_a_compiler_or_torch_is_reported_as_skipped_though_there_are_gpus(tree: Path) -> None:
    tests = gpu_sentinel.gpu_tests(tree)
    machine = Machine(8, "", {"//gpu:nvcc": "no nvcc", "//gpu:torch": ""})
    assert reasons(gpu_sentinel.report(tests, machine)[1]) == {"//a/b:compiled": "no nvcc"}
    machine = Machine(8, "", {"//gpu:nvcc": "", "//gpu:torch": "torch has no CUDA"})
    assert reasons(gpu_sentinel.report(tests, machine)[1]) == {"//a/b:compiled": "torch has no CUDA"}
    machine = Machine(0, "no nvidia-smi", {"//gpu:nvcc": "no nvcc", "//gpu:torch": "torch has no CUDA"})
    lacks_all = reasons(gpu_sentinel.report(tests, machine)[1])["//a/b:compiled"]
    assert lacks_all == "no nvidia-smi; no nvcc; torch has no CUDA"


def test_a_constraint_that_nobody_looked_for_is_not_taken_for_met(tree: Path) -> None:
    text, _ = gpu_sentinel.report(gpu_sentinel.gpu_tests(tree), Machine(8, "", {"//gpu:nvcc": ""}))
    assert "//a/b:compiled //gpu:torch is unknown" in text


def test_the_reason_is_that_of_the_machine(tree: Path) -> None:
    machine = Machine(0, "no nvidia-smi in $PATH", {"//gpu:nvcc": "", "//gpu:torch": ""})
    text, suite = gpu_sentinel.report(gpu_sentinel.gpu_tests(tree), machine)
    assert "no nvidia-smi in $PATH" in text
    assert set(reasons(suite).values()) == {"no nvidia-smi in $PATH"}


@pytest.mark.parametrize(("env", "code"), [({}, 0), ({"HYBRIDKV_GPUS": "required"}, 1)])
def test_a_skipped_test_is_a_failure_only_where_gpus_are_required(
    tree: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], code: int
) -> None:
    why_not = {"//gpu:nvcc": "", "//gpu:torch": ""}
    machine = tree / "machine.json"
    monkeypatch.chdir(tree)
    monkeypatch.delenv("HYBRIDKV_GPUS", raising=False)
    monkeypatch.delenv("XML_OUTPUT_FILE", raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["gpu_sentinel", str(machine)])
    machine.write_text(json.dumps({"gpus": 0, "why_not": why_not}))
    assert gpu_sentinel.main() == code
    machine.write_text(json.dumps({"gpus": 8, "why_not": why_not}))
    assert gpu_sentinel.main() == 0


def test_two_tests_never_hold_one_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_lease, "LEASES", tmp_path)
    monkeypatch.setattr(gpu_lease, "_held", [])
    assert gpu_lease._lease(["GPU-a", "GPU-b", "GPU-c"], 2) == ["GPU-a", "GPU-b"]
    assert gpu_lease._lease(["GPU-a", "GPU-b", "GPU-c"], 2) == []
    assert gpu_lease._lease(["GPU-a", "GPU-b", "GPU-c"], 1) == ["GPU-c"]


def test_a_lease_ends_with_its_holder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_lease, "LEASES", tmp_path)
    held: list[object] = []
    monkeypatch.setattr(gpu_lease, "_held", held)
    assert gpu_lease._lease(["GPU-a"], 1) == ["GPU-a"]
    for lock in list(held):
        lock.close()  # type: ignore[attr-defined]
    assert gpu_lease._lease(["GPU-a"], 1) == ["GPU-a"]


@pytest.fixture
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("usual_umask")
def test_a_lease_can_be_taken_after_another_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_lease, "LEASES", tmp_path / "leases")
    monkeypatch.setattr(gpu_lease, "_held", [])
    assert gpu_lease._lease(["GPU-a"], 1) == ["GPU-a"]
    assert (tmp_path / "leases").stat().st_mode & 0o7777 == 0o777
    assert (tmp_path / "leases" / "GPU-a").stat().st_mode & 0o777 == 0o666
    assert os.umask(0o022) == 0o022
