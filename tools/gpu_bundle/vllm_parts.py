"""Packs the parts of vLLM for CUDA that an engine on a Hopper GPU needs into a small archive.

The wheel has 326 MB; the archive has about a tenth of that. It also contains the dependencies of vLLM that a machine
with torch and transformers lacks. Left out:

- Device code for all architectures except sm_90, and all PTX. It is overwritten with zeros in place: zeros compress
  well, and the layout of the library does not change. On another GPU vLLM's kernels fail.
- All device code of FlashAttention. Its libraries are kept, because vLLM cannot be imported without them. Engines of
  the bundle compute attention in Triton.
- FlashMLA, DeepGEMM and other kernels for one kind of model, the HTTP server in Rust, and all files except Python code:
  headers, configurations of kernels, web pages.
- FlashInfer. VLLM_USE_FLASHINFER_SAMPLER=0 must be set.
"""

from __future__ import annotations

import io
import struct
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

WHEEL_SHA256 = "5e2ecdc5b0baf72921c288486417ca82778456a448e4fe60b62ee43c0dfc8611"
"""Hash of vllm 0.32.0 for CUDA 13 and x86-64. It is in no lock."""
PACKAGES = (
    *("annotated-types", "apache-tvm-ffi", "astor", "blake3", "cachetools", "cbor2", "compressed-tensors", "depyf"),
    *("dill", "dnspython", "email-validator", "fastapi", "googleapis-common-protos", "httpcore2", "httptools"),
    *("httpx2", "ijson", "interegular", "jiter", "jsonschema", "jsonschema-specifications", "lark", "llguidance"),
    *("lm-format-enforcer", "loguru", "model-hosting-container-standards", "msgspec", "openai", "opentelemetry-api"),
    *("opentelemetry-exporter-http-transport", "opentelemetry-exporter-otlp", "opentelemetry-exporter-otlp-common"),
    *("opentelemetry-exporter-otlp-proto-common", "opentelemetry-exporter-otlp-proto-grpc"),
    *("opentelemetry-exporter-otlp-proto-http", "opentelemetry-proto", "opentelemetry-sdk"),
    *("opentelemetry-semantic-conventions", "opentelemetry-semantic-conventions-ai", "oss-harmony"),
    *("partial-json-parser", "prometheus-fastapi-instrumentator", "pybase64", "pydantic", "pydantic-core"),
    *("pydantic-extra-types", "python-json-logger", "python-multipart", "pyzmq", "referencing", "rpds-py"),
    *("setproctitle", "sniffio", "starlette", "truststore", "typing-inspection", "uvicorn", "watchfiles", "websockets"),
    "xgrammar",
)
"""Dependencies, at the versions of the engine's lock."""
ARCHITECTURE = 90
KERNELS = (
    "vllm/_C_stable_libtorch.abi3.so",
    "vllm/_moe_C_stable_libtorch.abi3.so",
)
WITHOUT_KERNELS = (
    "vllm/cumem_allocator.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
)
SECTION = b".nv_fatbin"
CONTAINER = b"\x50\xed\x55\xba"
"""A fat binary: this word, version (2 bytes), length of this header (2) and of all entries (8); then the entries."""
MACHINE_CODE = 2
"""Kind of an entry: kind (2 bytes), version (2), length of this header (4), length of the code (8), 12 others, and the
architecture (4); then the code."""


def zero_device_code(library: bytes, keep: int | None) -> bytes:
    """The library with all device code zeroed, except machine code for the architecture `keep`."""
    stripped = bytearray(library)
    begin, end = _section(library, SECTION)
    begin = library.find(CONTAINER, begin, end)
    while begin >= 0:
        header, size = struct.unpack_from("<HQ", library, begin + 6)
        entry, stop = begin + header, begin + header + size
        while entry < stop:
            kind, header, size = struct.unpack_from("<HxxIQ", library, entry)
            (architecture,) = struct.unpack_from("<I", library, entry + 28)
            if (kind, architecture) != (MACHINE_CODE, keep):
                stripped[entry + header : entry + header + size] = bytes(size)
            entry += header + size
        begin = library.find(CONTAINER, stop, end)
    return bytes(stripped)


def _section(library: bytes, name: bytes) -> tuple[int, int]:
    """Range [begin, end) of a section of a 64-bit ELF file. Empty if there is no such section."""
    (table,) = struct.unpack_from("<Q", library, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", library, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", library, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    for name_offset, _, _, _, offset, size in headers:
        if library[names + name_offset :].startswith(name + b"\0"):
            return offset, offset + size
    return 0, 0


def write_archive(vllm: Path, packages: Sequence[Path], to: Path) -> None:
    """Writes a tar.xz of the wheels of vLLM and of its dependencies. It unpacks to a folder for PYTHONPATH."""
    with tarfile.open(to, "w:xz", preset=3) as archive:
        for wheel in (vllm, *packages):
            with zipfile.ZipFile(wheel) as files:
                for name in files.namelist():
                    content = _wanted(name, files) if wheel == vllm else files.read(name)
                    if content is not None and not name.endswith("/"):
                        entry = tarfile.TarInfo(name)
                        entry.size = len(content)
                        archive.addfile(entry, io.BytesIO(content))


def _wanted(name: str, wheel: zipfile.ZipFile) -> bytes | None:
    """Content of a file of vLLM's wheel in the archive. None if the file is left out."""
    if name in KERNELS:
        return zero_device_code(wheel.read(name), keep=ARCHITECTURE)
    if name in WITHOUT_KERNELS:
        return zero_device_code(wheel.read(name), keep=None)
    return wheel.read(name) if name.endswith(".py") or ".dist-info/" in name else None
