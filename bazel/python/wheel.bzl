"""Wheels and source distributions from a pyproject.toml, directories of them, and a library with installed metadata."""

load("@rules_python//python:defs.bzl", "py_library")

def _build(ctx, kind, shared):
    """Builds with hatchling from the files of the package, and from shared files at their paths in the tree."""
    output = ctx.actions.declare_directory(ctx.label.name)
    files = [ctx.file.pyproject] + ctx.files.srcs
    args = ctx.actions.args()
    args.add(kind)
    args.add(output.path)
    args.add("%s=LICENSE" % ctx.file._license.path)
    for file in shared:
        args.add("%s=%s" % (file.path, file.short_path))
    prefix = ctx.label.package + "/"
    for file in files:
        if not file.short_path.startswith(prefix):
            fail("%s is outside of %s" % (file.short_path, prefix))
        args.add("%s=%s" % (file.path, file.short_path.removeprefix(prefix)))
    ctx.actions.run(
        executable = ctx.executable._build_wheel,
        arguments = [args],
        # All entries get a date of 1980, so that the bytes of the file are reproducible.
        env = {"SOURCE_DATE_EPOCH": "315532800"},
        inputs = files + shared + [ctx.file._license],
        outputs = [output],
        mnemonic = "PyWheel",
        progress_message = "Building %{label}",
    )
    return [DefaultInfo(files = depset([output]))]

_ATTRS = {
    "pyproject": attr.label(allow_single_file = [".toml"], mandatory = True),
    "srcs": attr.label_list(allow_files = True, doc = "All files of the project, py.typed and native ones too."),
    "_build_wheel": attr.label(default = "//bazel/python:build_wheel", cfg = "exec", executable = True),
    "_license": attr.label(default = "//:LICENSE", allow_single_file = True),
}

def _wheel_impl(ctx):
    return _build(ctx, "wheel", [])

wheel = rule(
    implementation = _wheel_impl,
    doc = "A directory with one wheel. The name of the wheel has the version that pyproject.toml gives.",
    attrs = _ATTRS,
)

def _sdist_impl(ctx):
    return _build(ctx, "sdist", ctx.files.shared)

sdist = rule(
    implementation = _sdist_impl,
    doc = "A directory with one source distribution.",
    attrs = dict(
        _ATTRS,
        shared = attr.label_list(
            allow_files = True,
            doc = "Files of the whole tree, which keep their places in it.",
        ),
    ),
)

def _wheelhouse_impl(ctx):
    output = ctx.actions.declare_directory(ctx.label.name)
    left_out = ctx.actions.declare_file(ctx.label.name + "_left_out.txt")
    lines = ["%s: %s\n" % item for item in (ctx.attr.missing.items() + ctx.attr.left_out.items())]
    ctx.actions.write(left_out, "".join(lines))
    args = ctx.actions.args()
    args.add(output.path)
    args.add(left_out.path)
    args.add_all(ctx.files.srcs)
    ctx.actions.run_shell(
        command = """
out=$1 left_out=$2; shift 2
for wheel in "$@"; do cp "$wheel" "$out"; done
{ echo Has:; (cd "$out"; LC_ALL=C ls *.whl *.tar.gz | sed 's/^/  /'); echo; echo Left out:; sed 's/^/  /' "$left_out"; } >"$out/CONTENTS.txt.new"
mv "$out/CONTENTS.txt.new" "$out/CONTENTS.txt"
head -n %d "$left_out" | sed 's/^/wheelhouse: left out: /' >&2
""" % len(ctx.attr.missing),
        arguments = [args],
        inputs = ctx.files.srcs + [left_out],
        outputs = [output],
        mnemonic = "Wheelhouse",
        progress_message = "Collecting wheels in %{output}",
    )
    return [DefaultInfo(files = depset([output]))]

wheelhouse = rule(
    implementation = _wheelhouse_impl,
    doc = "One directory with all the wheels, for `pip install --find-links`, and CONTENTS.txt, which lists them.",
    attrs = {
        "left_out": attr.string_dict(doc = "Distributions that are never in the directory, with reasons."),
        "missing": attr.string_dict(doc = "Distributions that this machine cannot build, with reasons. The build prints them too."),
        "srcs": attr.label_list(mandatory = True),
    },
)

def _release_impl(ctx):
    output = ctx.actions.declare_directory(ctx.label.name)
    [wheelhouse] = ctx.files.wheelhouse
    args = ctx.actions.args()
    args.add(output.path)
    args.add(wheelhouse.path + "/CONTENTS.txt")
    args.add_all("--locks", ctx.files.locks)
    args.add_all("--directories", [wheelhouse] + ctx.files.sdists, expand_directories = False)
    ctx.actions.run(
        executable = ctx.executable._build_release,
        arguments = [args],
        inputs = ctx.files.locks + [wheelhouse] + ctx.files.sdists,
        outputs = [output],
        mnemonic = "Release",
        progress_message = "Collecting a release in %{output}",
    )
    return [DefaultInfo(files = depset([output]))]

release = rule(
    implementation = _release_impl,
    doc = "One directory with a wheelhouse, source distributions, SHA256SUMS, and a bill of materials (CycloneDX).",
    attrs = {
        "locks": attr.label_list(allow_files = True, doc = "Lock files with the tested versions of other packages."),
        "sdists": attr.label_list(mandatory = True),
        "wheelhouse": attr.label(mandatory = True),
        "_build_release": attr.label(default = "//bazel/python:build_release", cfg = "exec", executable = True),
    },
)

def _wheel_metadata_impl(ctx):
    output = ctx.actions.declare_directory(ctx.label.name)
    args = ctx.actions.args()
    args.add(output.path)
    args.add(ctx.file.wheel.path)
    ctx.actions.run(
        executable = ctx.executable._unpack_metadata,
        arguments = [args],
        inputs = [ctx.file.wheel],
        outputs = [output],
        mnemonic = "PyWheelMetadata",
        progress_message = "Unpacking the metadata of %{label}",
    )
    return [DefaultInfo(files = depset([output]), runfiles = ctx.runfiles([output]))]

_wheel_metadata = rule(
    implementation = _wheel_metadata_impl,
    doc = "The *.dist-info of a wheel, in a directory for sys.path.",
    attrs = {
        "wheel": attr.label(allow_single_file = True, mandatory = True),
        "_unpack_metadata": attr.label(default = "//bazel/python:unpack_metadata", cfg = "exec", executable = True),
    },
)

def installed_library(name, wheel, deps, **kwargs):
    """A py_library with the metadata of an installed distribution: Python finds its name, version and entry points.

    What needs no code of this tree to be imported (a plugin that its host finds by its entry point) needs this. It
    holds for every process that a Bazel target starts, because sys.path reaches them in PYTHONPATH.

    Args:
        name: the target's name.
        wheel: the `wheel` target that has the metadata.
        deps: py_library targets with the code.
        **kwargs: forwarded to py_library.
    """
    _wheel_metadata(
        name = name + "_metadata",
        wheel = wheel,
        visibility = ["//visibility:private"],
    )
    py_library(
        name = name,
        data = [":%s_metadata" % name],
        imports = [name + "_metadata"],
        deps = deps,
        **kwargs
    )
