"""The CUDA toolkit of this machine, if it works with the host compiler.

Provides the paths of nvcc and ptxas, the headers, the static runtime, and the architectures that nvcc supports. Without
a toolkit, targets that need it are incompatible with this machine: Bazel skips them; `why_not.txt` has the reason.
"""

_BUILD = """\
load("@rules_cc//cc:defs.bzl", "cc_import", "cc_library")

package(default_visibility = ["//visibility:public"])

exports_files(["why_not.txt"])

filegroup(
    name = "ptxas",
    srcs = ["cuda/bin/ptxas"],
)

cc_library(
    name = "headers",
    hdrs = glob(["cuda/include/**"]),
    includes = ["cuda/include"],
)

cc_import(
    name = "cudart_import",
    static_library = "cuda/{libraries}/libcudart_static.a",
)

cc_library(
    name = "cudart",
    linkopts = ["-ldl", "-lpthread", "-lrt"],
    deps = [":cudart_import", ":headers"],
)
"""

_ABSENT = """\
load("@rules_cc//cc:defs.bzl", "cc_library")

package(default_visibility = ["//visibility:public"])

exports_files(["why_not.txt"])

[
    cc_library(
        name = name,
        target_compatible_with = ["@hybridkv//bazel/gpu:working_nvcc"],
    )
    for name in ["headers", "cudart", "ptxas"]
]
"""

_PROBE = """\
#include <cuda_runtime.h>
__global__ void probe(float* x) { *x = rsqrtf(*x); }
"""

def _find(rctx):
    home = rctx.os.environ.get("CUDA_HOME", "")
    for root in [home] if home else ["/usr/local/cuda"]:
        if rctx.path(root + "/bin/nvcc").exists:
            return rctx.path(root).realpath
    nvcc = rctx.which("nvcc")
    return nvcc.realpath.dirname.dirname if nvcc else None

def _libraries(root):
    """Folder of the static runtime. It depends on the package of the toolkit."""
    for folder in ("lib64", "lib", "targets/x86_64-linux/lib"):
        if root.get_child(folder).get_child("libcudart_static.a").exists:
            return folder
    return None

def _why_not(rctx, root):
    if not root:
        return "no nvcc: none in $CUDA_HOME, /usr/local/cuda or $PATH"
    if not root.get_child("bin").get_child("nvcc").exists:
        return "%s has no bin/nvcc; set CUDA_HOME to a toolkit" % root
    if not _libraries(root):
        return "%s has no libcudart_static.a" % root

    # An installed nvcc may fail with the host's compiler or C library.
    rctx.file("probe.cu", _PROBE)
    result = rctx.execute([root.get_child("bin").get_child("nvcc"), "-arch=sm_90", "-cubin", "-o", "probe.cubin", "probe.cu"])
    if result.return_code:
        return "{} cannot compile here: {}".format(root, result.stderr.split("\n")[0])
    return ""

def _local_cuda_impl(rctx):
    root = _find(rctx)
    reason = _why_not(rctx, root)
    if reason and rctx.os.environ.get("HYBRIDKV_CUDA", "") == "required":
        fail(reason)
    archs = []
    if reason:
        # buildifier: disable=print
        print("CUDA targets are skipped; " + reason)
        rctx.file("BUILD.bazel", _ABSENT)
    else:
        known = rctx.execute([root.get_child("bin").get_child("nvcc"), "--list-gpu-code"]).stdout.splitlines()
        archs = [code.removeprefix("sm_") for code in known if code.startswith("sm_")]
        rctx.symlink(root, "cuda")
        rctx.file("BUILD.bazel", _BUILD.format(libraries = _libraries(root)))
    rctx.file("why_not.txt", reason)
    rctx.file("defs.bzl", "NVCC = {}\n\nKNOWN_ARCHS = {}\n".format(
        repr("" if reason else str(root) + "/bin/nvcc"),
        repr(archs),
    ))

local_cuda = repository_rule(
    implementation = _local_cuda_impl,
    environ = ["CUDA_HOME", "HYBRIDKV_CUDA", "PATH"],
    local = True,
)
