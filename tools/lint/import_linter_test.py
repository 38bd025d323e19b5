"""Checks the contracts of the root pyproject.toml on the libraries' sources, without importing them."""

import pathlib
import sys

from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports


def main(config: str) -> int:
    sources = [*pathlib.Path("libs").glob("*/src"), pathlib.Path("csrc/bindings/src"), pathlib.Path("tests")]
    sys.path[:0] = sorted(str(source.absolute()) for source in sources)
    return int(lint_imports(config_filename=config, no_cache=True, verbose=False) != EXIT_STATUS_SUCCESS)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
