"""The bundle for GPU machines is complete and small, and the parts of its run that need no GPU succeed."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import vllm_parts

HERE = Path(__file__).absolute().parent
MOST_BYTES = 60 << 20


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "gpu_bundle"
    subprocess.run([sys.executable, str(HERE / "pack.py"), str(folder), "--sources-only"], check=True)
    return folder


def run(bundle: Path, scratch: Path, **settings: str) -> tuple[int, str]:
    """The exit status of run.sh, and its summary."""
    scratch.mkdir()
    places = {"OUT": str(scratch / "out"), "WORK": str(scratch / "work"), "PYTHON": sys.executable}
    # pytest and the packages that the tests import come from this process's path. A few tests are enough.
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTEST_ADDOPTS": "-k wrong_byte"}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HYBRIDKV_")}
    done = subprocess.run(
        ["bash", str(bundle / "run.sh")],
        check=False,
        capture_output=True,
        text=True,
        cwd=scratch,
        env=environment | places | path | settings,
    )
    summary = (scratch / "out" / "summary.txt").read_text()
    print(done.stdout, done.stderr)
    return done.returncode, summary


def test_sources_leave_room_for_libraries_and_wheels(bundle: Path) -> None:
    assert sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file()) < MOST_BYTES // 4


def test_each_file_named_by_the_run_exists(bundle: Path) -> None:
    script = (bundle / "run.sh").read_text()
    named = {
        match[1].replace("$TREE", str(bundle / "tree")).replace("$BUNDLE", str(bundle))
        for match in re.finditer(r'"?(\$(?:TREE|BUNDLE)"?/[\w./*{},-]+)', script)
    }
    named = {name.replace('"', "") for name in named}
    # Created by the run, or by pack.py when it builds.
    missing = {name for name in named if not re.search("/prebuilt|/vllm.txz", name) and not _found(name)}
    assert not missing
    assert len(named) > 15


def test_hybridkv_native_comes_before_what_imports_it(bundle: Path) -> None:
    stages = re.findall(r"^stage (\w+)", (bundle / "run.sh").read_text(), re.MULTILINE)
    assert stages[:3] == ["facts", "packages", "host"]


def _found(name: str) -> bool:
    braces = re.fullmatch(r"(.*)\{(.*)\}(.*)", name)
    if braces:
        return all(_found(braces[1] + part + braces[3]) for part in braces[2].split(","))
    path = Path(name)
    return any(path.parents[name.count("*")].glob("/".join(path.parts[-1 - name.count("*") :]))) or path.exists()


@pytest.mark.full
def test_a_dry_run_of_cheap_stages_succeeds(bundle: Path, tmp_path: Path) -> None:
    code, summary = run(bundle, tmp_path / "dry", DRY="1", STAGES="facts packages kernels", CUDA_VISIBLE_DEVICES="")
    assert code == 0, summary
    assert re.search(r"^kernels: ok in \d+ s: \d+ tests, 0 failures, 0 errors, \d+ skipped", summary, re.MULTILINE)
    assert re.search(r"^facts: ok", summary, re.MULTILINE)
    assert (tmp_path / "dry" / "out" / "logs.tgz").exists()


@pytest.mark.full
def test_a_skipped_test_fails_a_run_that_requires_a_gpu(bundle: Path, tmp_path: Path) -> None:
    """This machine has no GPU, or the GPU library was not built."""
    code, summary = run(bundle, tmp_path / "wet", STAGES="kernels", CUDA_VISIBLE_DEVICES="")
    assert code == 1, summary
    assert re.search(r"^kernels: FAILED.*\n  .*this test was given a GPU, yet", summary, re.MULTILINE)


def test_a_stage_without_time_left_is_reported_and_fails_the_run(bundle: Path, tmp_path: Path) -> None:
    code, summary = run(bundle, tmp_path / "late", DRY="1", STAGES="facts", BUDGET_S="1")
    assert code == 1
    assert "facts: NOT RUN" in summary


def fill(wheels: Path, site: Path) -> str:
    command = [sys.executable, str(HERE / "fill_site.py"), str(wheels), str(site)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_only_missing_packages_for_this_python_are_unpacked(tmp_path: Path) -> None:
    this = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    wheels = {
        "pip": "py3-none-any",
        "lacking_pure": "py3-none-any",
        "lacking_own": f"{this}-{this}-manylinux_2_28_x86_64",
        "lacking_stable": "cp310-abi3-manylinux_2_28_x86_64",
        "lacking_later": "cp399-cp399-manylinux_2_28_x86_64",
        "lacking_stable_later": "cp399-abi3-manylinux_2_28_x86_64",
    }
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name, tags in wheels.items():
        with zipfile.ZipFile(folder / f"{name}-1.0-{tags}.whl", "w") as archive:
            archive.writestr(f"{name}.py", "")
    output = fill(folder, tmp_path / "site")
    unpacked = {path.stem for path in (tmp_path / "site").iterdir()}
    assert unpacked - {"pip"} == {"lacking_pure", "lacking_own", "lacking_stable"}
    assert "for another Python: lacking_later-1.0" in output


def library(*codes: tuple[int, int, bytes]) -> bytes:
    """An ELF file with one fat binary of entries (kind, architecture, code)."""
    entries = b"".join(
        struct.pack("<HHIQ12xI", kind, 1, 32, len(code), architecture) + code for kind, architecture, code in codes
    )
    section = struct.pack("<4sHHQ", vllm_parts.CONTAINER, 1, 16, len(entries)) + entries
    names = b"\0.shstrtab\0.nv_fatbin\0"
    table = 64 + len(section) + len(names)
    header = bytearray(64)
    struct.pack_into("<Q", header, 0x28, table)
    struct.pack_into("<HHH", header, 0x3A, 64, 2, 1)
    headers = [(11, 64, len(section)), (1, 64 + len(section), len(names))]
    rows = b"".join(struct.pack("<IIQQQQ24x", name, 1, 0, 0, offset, size) for name, offset, size in headers)
    return bytes(header) + section + names + rows


def test_device_code_of_other_architectures_is_zeroed() -> None:
    codes = [(2, 80, b"a" * 24), (2, 90, b"b" * 40), (1, 90, b"c" * 8), (2, 120, b"d" * 16)]
    whole = library(*codes)
    for keep in (90, None):
        zeroed = [(*code[:2], code[2] if code[:2] == (2, keep) else bytes(len(code[2]))) for code in codes]
        assert vllm_parts.zero_device_code(whole, keep) == library(*zeroed)
        assert library(*zeroed) != whole


def test_a_library_without_device_code_does_not_change() -> None:
    plain = library().replace(b".nv_fatbin", b".no_fatbin")
    assert vllm_parts.zero_device_code(plain, 90) == plain
