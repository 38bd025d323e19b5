"""A test that says which GPU tests did not run."""

load("@rules_python//python:defs.bzl", "py_test")

def gpu_sentinel(name, build_files, **kwargs):
    """Names every gpu_test of the tree that lacks something on this machine, as skipped tests with the reason.

    `bazel run` it to read the list; in `bazel test` it is the report of a target that passes.

    Args:
        name: the target's name.
        build_files: the BUILD files of the tree.
        **kwargs: forwarded to py_test.
    """
    main = Label("//bazel/gpu:gpu_sentinel.py")
    py_test(
        name = name,
        srcs = [main],
        main = main,
        args = ["$(rootpath @local_gpus//:machine.json)"],
        data = build_files + ["@local_gpus//:machine.json"],
        **kwargs
    )
