"""Unpacks the package `vllm` from a source archive. Its version becomes that of a CPU build.

unpack_vllm.py URL SHA256 VERSION FOLDER
"""

import hashlib
import io
import sys
import tarfile
import urllib.request
from pathlib import Path

SUFFIXES = (".py", ".json", ".jinja")
"""Suffixes of the needed files. Kernels are not needed."""


def fetch(url: str, sha256: str) -> bytes:
    """Content of the archive.

    Raises:
        ValueError: its digest is another.
    """
    with urllib.request.urlopen(url, timeout=600) as answer:
        archive: bytes = answer.read()
    found = hashlib.sha256(archive).hexdigest()
    if found != sha256:
        raise ValueError(f"{url}: expected sha256 {sha256}, got {found}")
    return archive


def unpack(archive: bytes, version: str, folder: Path) -> None:
    """Writes `vllm/` and its metadata to a folder."""
    root = f"vllm-{version}/"
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        for member in members:
            name = member.name.removeprefix(root)
            if not member.isfile() or not name.startswith("vllm/") or not name.endswith(SUFFIXES):
                continue
            if ".." in Path(name).parts:
                raise ValueError(f"{member.name} points out of the archive")
            content = members.extractfile(member)
            assert content is not None
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.read())
    # vLLM reads here whether it is a CPU build.
    info = folder / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf-8")


if __name__ == "__main__":
    unpack(fetch(*sys.argv[1:3]), sys.argv[3], Path(sys.argv[4]))
