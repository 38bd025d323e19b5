"""The sentinel finds every gpu_test and says which did not run; a lease gives each test its own GPUs. Needs no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from bazel.gpu import gpu_lease, gpu_sentinel
from bazel.gpu.gpu_sentinel import GpuTest


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "BUILD.bazel").write_text('load("x", "gpu_test")\npytest_test(name = "cpu")\n')
    (tmp_path / "a" / "BUILD.bazel").write_text('gpu_test(\n    name = "one",\n    srcs = ["t.py"],\n)\n')
    (tmp_path / "a" / "b" / "BUILD.bazel").write_text('gpu_test(name = "two", srcs = [], gpus = 2)\n')
    return tmp_path


def test_every_gpu_test_is_found(tree: Path) -> None:
    assert gpu_sentinel.gpu_tests(tree) == [GpuTest("//a:one", 1), GpuTest("//a/b:two", 2)]


@pytest.mark.parametrize(("gpus", "skipped"), [(0, ["//a:one", "//a/b:two"]), (1, ["//a/b:two"]), (2, [])])
def test_what_has_too_few_gpus_is_reported_as_skipped(tree: Path, gpus: int, skipped: list[str]) -> None:
    text, suite = gpu_sentinel.report(gpu_sentinel.gpu_tests(tree), gpus, "" if gpus else "no nvidia-smi in $PATH")
    assert text.startswith(f"{len(skipped)} of 2 GPU test targets did NOT run here")
    assert [case.get("name") for case in suite if case.find("skipped") is not None] == skipped
    assert all(f"  {label} " in text for label in skipped)


def test_the_reason_is_that_of_the_machine(tree: Path) -> None:
    text, suite = gpu_sentinel.report(gpu_sentinel.gpu_tests(tree), 0, "no nvidia-smi in $PATH")
    assert "no nvidia-smi in $PATH" in text
    assert {found.get("message") for found in suite.iter("skipped")} == {"no nvidia-smi in $PATH"}


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
