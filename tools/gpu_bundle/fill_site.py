"""Unpacks those wheels of the bundle that this Python lacks: fill_site.py WHEELS FOLDER.

Skips installed distributions, whatever their version. Skips and lists wheels for another Python. Needs neither pip nor
a network.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
import zipfile
from pathlib import Path


def fits(tags: str) -> bool:
    """True if this Python can import a wheel with these tags (such as `cp312-cp312-manylinux_2_28_x86_64`)."""
    pythons, abis, _ = tags.split("-", 2)
    major, minor = sys.version_info[:2]
    for python in pythons.split("."):
        if python in ("py3", f"cp{major}{minor}"):
            return True
        oldest = re.fullmatch(r"cp3(\d+)", python)
        if "abi3" in abis.split(".") and oldest and minor >= int(oldest[1]):
            return True
    return False


def is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def main(wheels: Path, site: Path) -> int:
    site.mkdir(parents=True, exist_ok=True)
    # Packages that an earlier run unpacked count as missing, and are unpacked again.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != site.resolve()]
    taken, there, unfit = [], [], []
    for wheel in sorted(wheels.glob("*.whl")):
        name, _, tags = wheel.stem.split("-", 2)
        if is_installed(name):
            there.append(name)
        elif not fits(tags):
            unfit.append(wheel.name)
        else:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
            taken.append(name)
    words = [f"from the bundle: {', '.join(taken) or 'none'}", f"installed already: {', '.join(there) or 'none'}"]
    if unfit:
        words.append(f"for another Python: {', '.join(unfit)}")
    print("result:", "; ".join(words))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
