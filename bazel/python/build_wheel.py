"""Builds a wheel or a source distribution with hatchling, the backend that the project's pyproject.toml names.

Arguments: `wheel` or `sdist`, the output directory, then `path=place` pairs: the files and their places in the project.
"""

import os
import pathlib
import shutil
import sys
import tempfile

from hatchling import build


def main(kind: str, output: str, *files: str) -> None:
    destination = pathlib.Path(output).resolve()
    with tempfile.TemporaryDirectory() as scratch:
        project = pathlib.Path(scratch)
        for pair in files:
            path, place = pair.split("=")
            (project / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, project / place)
        os.chdir(project)
        (build.build_sdist if kind == "sdist" else build.build_wheel)(str(destination))


if __name__ == "__main__":
    main(*sys.argv[1:])
