"""A test that lists the GPU tests that did not run."""

load("@rules_python//python:defs.bzl", "py_test")

def gpu_sentinel(name, build_files, **kwargs):
    """Lists every gpu_test of the tree that cannot run on this machine, as a skipped test with the reason.

    `bazel run` prints the list. With `bazel test` it is in the report of this target, which passes.

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
