"""A py_library of code without comments and docstrings, so that tests run again only when code changes."""

load("@rules_python//python:defs.bzl", "py_library")

_ROOT = "src/"

def _code_only_impl(ctx):
    copies = []
    args = ctx.actions.args()
    for source in ctx.files.srcs:
        path = source.short_path.removeprefix(ctx.label.package + "/").removeprefix(_ROOT)
        copy = ctx.actions.declare_file("code/" + path)
        args.add(source)
        args.add(copy)
        copies.append(copy)
    ctx.actions.run(
        executable = ctx.executable._code_only,
        arguments = [args],
        inputs = ctx.files.srcs,
        outputs = copies,
        mnemonic = "PyCodeOnly",
        progress_message = "Leaving out the prose of %{label}",
    )
    return [DefaultInfo(files = depset(copies))]

_code_only = rule(
    implementation = _code_only_impl,
    attrs = {
        "srcs": attr.label_list(allow_files = [".py"]),
        "_code_only": attr.label(default = "//bazel/python:code_only", cfg = "exec", executable = True),
    },
)

def code_library(name, srcs, **kwargs):
    """Removes comments and docstrings; line numbers do not change. Wheels contain the unchanged sources.

    Args:
        name: the target's name.
        srcs: Python files below `src/`.
        **kwargs: forwarded to py_library.
    """
    testonly = kwargs.get("testonly", False)
    _code_only(
        name = name + "_code",
        testonly = testonly,
        srcs = srcs,
        visibility = ["//visibility:private"],
    )
    py_library(
        name = name,
        srcs = [":%s_code" % name],
        imports = ["code"],
        **kwargs
    )
