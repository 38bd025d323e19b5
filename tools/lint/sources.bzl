"""What the lint tests read of one package."""

_PATTERNS = ["*.bazel", "*.bzl", "*.py", "*.pyi"]

def lint_sources(name, srcs = None):
    """Collects the package's Python and Starlark files, new ones too.

    //tools/lint lists the packages; a new package joins there.

    Args:
        name: `lint_sources` in every package.
        srcs: patterns; by default everything down to the next package.
    """
    native.filegroup(
        name = name,
        srcs = native.glob(srcs or ["**/" + pattern for pattern in _PATTERNS], allow_empty = True),
        visibility = ["//tools/lint:__pkg__"],
    )
