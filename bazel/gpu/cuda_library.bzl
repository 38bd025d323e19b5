"""Device code, compiled by nvcc."""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain", "use_cpp_toolchain")
load("@local_cuda//:defs.bzl", "KNOWN_ARCHS", "NVCC")
load("@rules_cc//cc:defs.bzl", "cc_library")

def _nvcc_arguments(ctx, cc, compilation):
    args = ctx.actions.args()
    args.add("-ccbin", cc.compiler_executable)
    args.add_all(["-std=c++17", "-O3", "-Xcompiler", "-fPIC", "-Xcompiler", "-Wall"])
    for context in compilation:
        args.add_all(context.defines, before_each = "-D")

        # nvcc has no -iquote.
        args.add_all(depset(transitive = [context.quote_includes, context.includes]), before_each = "-I")
        args.add_all(context.system_includes, before_each = "-isystem", uniquify = True)
    args.add("-I.")
    return args

def _cuda_objects_impl(ctx):
    cc = find_cpp_toolchain(ctx)
    compilation = [dep[CcInfo].compilation_context for dep in ctx.attr.deps]  # buildifier: disable=native-cc-info
    headers = depset(transitive = [context.headers for context in compilation])
    common = _nvcc_arguments(ctx, cc, compilation)
    archs = [arch for arch in ctx.attr.archs if arch in KNOWN_ARCHS]
    fat = ["-gencode=arch=compute_%s,code=sm_%s" % (arch, arch) for arch in archs]

    # PTX of the lowest architecture is for GPUs without machine code: every later GPU can compile it.
    fat.append("-gencode=arch=compute_%s,code=compute_%s" % (archs[0], archs[0]))

    objects, code = [], []
    for src in ctx.files.srcs:
        stem = ctx.label.name + "/" + src.basename.removesuffix(".cu")
        jobs = [(stem + ".pic.o", ["-c"] + fat, objects)]
        jobs += [(stem + ".sm_%s.cubin" % arch, ["-cubin", "-arch=sm_" + arch], code) for arch in archs]
        jobs.append((stem + ".ptx", ["-ptx", "-arch=compute_" + archs[0]], code))
        for output, flags, outputs in jobs:
            file = ctx.actions.declare_file(output)
            outputs.append(file)
            args = ctx.actions.args()
            args.add_all(flags)
            args.add("-o", file)
            args.add(src)
            ctx.actions.run(
                executable = NVCC,
                arguments = [common, args],
                inputs = depset([src] + ctx.files.hdrs, transitive = [headers]),
                tools = cc.all_files,
                outputs = [file],
                mnemonic = "CudaCompile",
                progress_message = "Compiling %{output}",
                use_default_shell_env = True,
            )
    return [
        DefaultInfo(files = depset(objects)),
        OutputGroupInfo(device_code = depset(code)),
    ]

_cuda_objects = rule(
    implementation = _cuda_objects_impl,
    doc = "One object file for each source, with machine code for `archs` and PTX; output group device_code has the same apart.",
    attrs = {
        "archs": attr.string_list(mandatory = True),
        "deps": attr.label_list(providers = [CcInfo]),  # buildifier: disable=native-cc-info
        "hdrs": attr.label_list(allow_files = [".h"]),
        "srcs": attr.label_list(allow_files = [".cu"], mandatory = True),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
    toolchains = use_cpp_toolchain(),
    fragments = ["cpp"],
)

def cuda_library(name, srcs, hdrs = [], deps = [], archs = ["80", "90", "100"], target_compatible_with = [], **kwargs):
    """A cc_library from .cu files, compiled by the nvcc of this machine; skipped without a working nvcc.

    `<name>_device_code` is for tests without a GPU: a .cubin for each architecture, and a .ptx.

    Args:
        name: the target's name.
        srcs: .cu files.
        hdrs: headers of this library.
        deps: cc_library targets.
        archs: compute capabilities, lowest first; those unknown to nvcc are left out.
        target_compatible_with: further constraints.
        **kwargs: forwarded to cc_library.
    """
    needs_nvcc = target_compatible_with + [Label("//bazel/gpu:working_nvcc")]
    cuda = ["@local_cuda//:headers", "@local_cuda//:cudart"]
    _cuda_objects(
        name = name + "_objects",
        srcs = srcs,
        hdrs = hdrs,
        archs = archs,
        target_compatible_with = needs_nvcc,
        visibility = ["//visibility:private"],
        deps = deps + cuda,
    )
    native.filegroup(
        name = name + "_device_code",
        srcs = [":%s_objects" % name],
        output_group = "device_code",
        target_compatible_with = needs_nvcc,
        visibility = ["//visibility:private"],
    )
    cc_library(
        name = name,
        srcs = [":%s_objects" % name],
        hdrs = hdrs,
        linkstatic = True,
        target_compatible_with = needs_nvcc,
        deps = deps + cuda,
        **kwargs
    )
