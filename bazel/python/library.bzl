"""A library of this tree: its code, tests, wheel, and sources for the lint tests."""

load("//bazel/python:code_library.bzl", "code_library")
load("//bazel/python:pytest_test.bzl", "pytest_test")
load("//bazel/python:wheel.bzl", "sdist", "wheel")
load("//tools/lint:sources.bzl", "lint_sources")

def hybridkv_library(
        name,
        deps,
        exclude = [],
        test_data = [],
        test_deps = [],
        test_env = {},
        test_exclude = [],
        test_shards = None,
        test_size = "medium",
        **kwargs):
    """The targets of a package in libs/: `<name>`, `<name>_test`, `wheel`, `sdist` and `lint_sources`.

    The code is `src/hybridkv/<name>`. The tests are all of `tests/`; they can read its pages and golden files.
    The wheel contains all of `src/`. The visibility is the package's `default_visibility`: its layer.

    Args:
        name: the package's last name: `planner` for hybridkv.planner.
        deps: imports of the code.
        exclude: patterns of files in `src/` that do not belong to `<name>`.
        test_data: further files that the tests read.
        test_deps: further imports of the tests.
        test_env: environment variables of the tests.
        test_exclude: patterns of files in `tests/` that do not belong to `<name>_test`.
        test_shards: `shard_count` of `<name>_test`.
        test_size: `size` of `<name>_test`.
        **kwargs: forwarded to py_library.
    """
    code_library(
        name = name,
        srcs = native.glob(
            ["src/**/*.py"],
            exclude = exclude,
        ),
        deps = deps,
        **kwargs
    )
    pytest_test(
        name = name + "_test",
        size = test_size,
        shard_count = test_shards,
        srcs = native.glob(
            ["tests/**/*.py"],
            allow_empty = True,
            exclude = test_exclude,
        ),
        data = native.glob(
            [
                "**/*.md",
                "tests/golden/*",
            ],
            allow_empty = True,
        ) + test_data,
        env = test_env,
        imports = ["tests"],
        deps = [":" + name] + test_deps,
    )
    package = [
        "README.md",
        "src/hybridkv/%s/py.typed" % name,
    ] + native.glob(["src/**/*.py"])
    wheel(
        name = "wheel",
        srcs = package,
        pyproject = "pyproject.toml",
    )
    sdist(
        name = "sdist",
        srcs = package + ["CHANGELOG.md"],
        pyproject = "pyproject.toml",
    )
    native.exports_files(
        ["pyproject.toml"],
        visibility = ["//tools/lint:__pkg__"],
    )
    lint_sources(name = "lint_sources")
