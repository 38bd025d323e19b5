"""Limits of control groups, read from files in the format of the operating system."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridkv.transfer.pinned import MemoryLimit, memory_limit

STAT = "anon 5\nfile 70\nactive_file 20\ninactive_file 30\ntotal_active_file 200\ntotal_inactive_file 300\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def group(path: str, limit: str, used: int) -> dict[str, str]:
    directory = f"sys/fs/cgroup/{path}"
    return {f"{directory}/memory.max": limit, f"{directory}/memory.current": f"{used}\n"} | {
        f"{directory}/memory.stat": STAT
    }


def old_group(path: str, limit: int, used: int) -> dict[str, str]:
    directory = f"sys/fs/cgroup/memory/{path}"
    return {f"{directory}/memory.limit_in_bytes": f"{limit}\n", f"{directory}/memory.usage_in_bytes": f"{used}\n"} | {
        f"{directory}/memory.stat": STAT
    }


def test_a_group_has_the_rest_of_its_limit_plus_its_file_cache(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/self/cgroup": "0::/pod/engine\n", **group("pod/engine", "1000\n", 900)})
    assert memory_limit(root) == MemoryLimit(root / "sys/fs/cgroup/pod/engine", 1000, 150)


def test_the_limit_of_a_parent_group_counts_too(tmp_path: Path) -> None:
    groups = group("pod/engine", "max\n", 100) | group("pod", "500\n", 300)
    limit = memory_limit(write(tmp_path, {"proc/self/cgroup": "0::/pod/engine\n", **groups}))
    assert limit is not None and (limit.directory.name, limit.free_bytes) == ("pod", 250)


def test_groups_of_version_1_are_read(tmp_path: Path) -> None:
    lines = "5:cpu,cpuacct:/x\n4:memory:/pod\n0::/\n"
    root = write(tmp_path, {"proc/self/cgroup": lines, **old_group("pod", 1000, 900)})
    assert memory_limit(root) == MemoryLimit(root / "sys/fs/cgroup/memory/pod", 1000, 600)


def test_a_container_with_the_path_of_its_host_has_its_limit_at_the_root(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/self/cgroup": "4:memory:/docker/0123\n", **old_group(".", 1000, 900)})
    assert memory_limit(root) == MemoryLimit(root / "sys/fs/cgroup/memory", 1000, 600)


@pytest.mark.parametrize("lines", [None, "0::/\n"])
def test_a_group_without_a_limit_reports_none(lines: str | None, tmp_path: Path) -> None:
    assert memory_limit(write(tmp_path, {"proc/self/cgroup": lines} if lines else {})) is None


def test_the_groups_of_this_machine_can_be_read() -> None:
    """With or without a limit."""
    limit = memory_limit()
    assert limit is None or limit.num_bytes > 0
