"""Unpacks the *.dist-info of the one wheel in a directory, without its RECORD, an index of files that are missing here.

Arguments: the output directory, and the directory with the wheel.
"""

import pathlib
import sys
import zipfile


def main(output: str, directory: str) -> None:
    (wheel,) = pathlib.Path(directory).glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            folder, _, file = name.partition("/")
            if folder.endswith(".dist-info") and file != "RECORD":
                archive.extract(name, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
