"""Files of one package for the tests of the whole tree."""

_PATTERNS = ["*.bazel", "*.bzl", "*.py", "*.pyi"]

def lint_sources(name, srcs = None, files = None):
    """Collects the package's Python and Starlark files, and all of its files, new ones too.

    //tools/lint lists the packages; a new package joins there. All files are in `package_files`: the test of
    the pages checks that the files that pages name exist.

    Args:
        name: `lint_sources` in every package.
        srcs: patterns of the former; by default everything down to the next package.
        files: patterns of the latter; the same default.
    """
    native.filegroup(
        name = name,
        srcs = native.glob(srcs or ["**/" + pattern for pattern in _PATTERNS], allow_empty = True),
        visibility = ["//tools/lint:__pkg__"],
    )
    native.filegroup(
        name = "package_files",
        srcs = native.glob(
            files or ["**"],
            allow_empty = True,
            exclude = ["**/__pycache__/**"],
        ),
        visibility = ["//tools/lint:__pkg__"],
    )
