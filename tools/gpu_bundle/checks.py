"""Checks of the GPU machine, called by run.sh. All of them also run without a GPU.

    checks.py facts           prints versions of Python and of the needed distributions; fails without a GPU
    checks.py gpu             checks that torch sees a GPU
    checks.py libraries       checks that libhybridkv_cuda.so can be loaded, and that a GPU, if torch sees one, accepts
                              its kernel
    checks.py copies          prints the implementation of the copy mode "engine"
    checks.py report FILE     counts the tests of a JUnit report, and prints reasons; fails if a test failed or was
                              skipped, or if none ran
    checks.py vllm            checks that vLLM for CUDA can be imported

The result is in the line that begins with "result:". Exit status 1: the check failed. If the environment variable DRY
is set, no check fails because of a missing GPU or of skipped tests.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import xml.etree.ElementTree as ET

EXPECTED = ("numpy", "torch")
"""Not in the bundle: too large, and installed on every machine that uses a GPU from Python."""
MOST_REASONS = 5
"""Maximum number of printed reasons of failures, errors and skips."""
MOST_CHARACTERS = 200
IS_DRY = bool(os.environ.get("DRY"))
NEEDED = (*EXPECTED, "pytest", "hypothesis", "xxhash", "msgspec", "vllm", "triton")


def facts() -> bool:
    print("Python", platform.python_version(), platform.platform())
    for name in NEEDED:
        try:
            print(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            print(name, "is not installed", "and the bundle has none" if name in EXPECTED else "")
    return gpu()


def gpu() -> bool:
    try:
        import torch
    except ImportError as error:
        print(f"result: no torch: {error}")
        return IS_DRY
    found = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        print(f"result: {found}, sees no GPU")
        return IS_DRY
    print(torch.cuda.get_device_properties(0))
    print(f"result: {torch.cuda.get_device_name(0)}, {found}, Python {platform.python_version()}")
    return True


def libraries() -> bool:
    import torch

    from hybridkv.transfer.cuda import open_device
    from hybridkv.transfer.cuda.kernel_device import load_library

    library = load_library()
    print("interface", library.hybridkv_cuda_interface_version())
    if torch.cuda.is_available():
        open_device(torch.cuda.current_device())
        print("the GPU takes the kernel; batched copies by the driver:", bool(library.hybridkv_cuda_has_batch_copy()))
    return True


def copies() -> bool:
    from engine_copies import find_engine_copies

    print("result:", find_engine_copies()[0])
    return True


def report(path: str) -> bool:
    suites = list(ET.parse(path).getroot().iter("testsuite"))
    counts = {
        key: sum(int(suite.get(key, "0")) for suite in suites) for key in ("tests", "failures", "errors", "skipped")
    }
    cases = [case for suite in suites for case in suite.iter("testcase")]
    for case in cases:
        for found in case.iter("property"):
            print(f"note: {case.get('name')}: {found.get('value')}")
    bad = [found for case in cases for kind in ("failure", "error", "skipped") for found in case.iter(kind)]
    reasons = sorted({" ".join(found.get("message", "").split())[:MOST_CHARACTERS] for found in bad})
    for reason in reasons[:MOST_REASONS]:
        print(f"note: {reason}")
    print("result:", ", ".join(f"{count} {name}" for name, count in counts.items()))
    return counts["tests"] > 0 and not counts["failures"] + counts["errors"] and (IS_DRY or not counts["skipped"])


def vllm() -> bool:
    from engine_copies import vllm_copies

    name, found = vllm_copies()
    print("result:", name)
    return found is not None


COMMANDS = {"facts": facts, "gpu": gpu, "libraries": libraries, "copies": copies, "report": report, "vllm": vllm}

if __name__ == "__main__":
    sys.exit(not COMMANDS[sys.argv[1]](*sys.argv[2:]))
