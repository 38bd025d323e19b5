"""A py_test whose sources are pytest modules."""

load("@rules_python//python:defs.bzl", "py_test")

def pytest_test(name, srcs, deps = [], args = [], data = [], **kwargs):
    """Runs pytest modules as one Bazel test, with its XML report, sharding and --test_filter.

    Makes no target if the sources contain no test_*.py.

    Args:
        name: the target's name.
        srcs: pytest modules, and the conftest.py and helpers beside them.
        deps: py_library targets that the modules import.
        args: further arguments of pytest.
        data: files that the tests read.
        **kwargs: forwarded to py_test; `imports` lists the folders of helper modules.
    """
    main = Label("//bazel/python:pytest_main.py")
    modules = [src for src in srcs if src.split("/")[-1].split(":")[-1].startswith("test_")]
    if not modules:
        return
    py_test(
        name = name,
        srcs = srcs + [main],
        main = main,
        args = args + ["$(rootpath %s)" % module for module in modules],
        data = data + [Label("//bazel/python:without_avx512/sitecustomize.py")],
        deps = deps + ["@pypi//:pytest"],
        **kwargs
    )
