"""torch's C++ headers and libraries, from the torch that the engine's lock installs, as `@torch_cc`."""

_BUILD = """\
load("@rules_cc//cc:defs.bzl", "cc_library")

package(default_visibility = ["//visibility:public"])

# Only what the stable ABI needs: three folders of headers, and the two libraries that its symbols are in.
cc_library(
    name = "torch_cc",
    srcs = [
        "torch/lib/libc10.so",
        "torch/lib/libtorch_cpu.so",
    ],
    hdrs = glob([
        "torch/include/torch/csrc/inductor/aoti_torch/**/*.h",
        "torch/include/torch/csrc/stable/**/*.h",
        "torch/include/torch/headeronly/**/*.h",
    ]),
    includes = ["torch/include"],
)
"""

def _torch_headers_impl(rctx):
    root = rctx.path(rctx.attr.packages).dirname.get_child("site-packages").get_child("torch")
    if not root.exists:
        fail("%s installs no torch" % rctx.attr.packages)
    rctx.symlink(root.get_child("include"), "torch/include")
    for library in ("libc10.so", "libtorch_cpu.so"):
        rctx.symlink(root.get_child("lib").get_child(library), "torch/lib/" + library)
    rctx.file("BUILD.bazel", _BUILD)

torch_headers = repository_rule(
    implementation = _torch_headers_impl,
    attrs = {"packages": attr.label(mandatory = True, doc = "The BUILD file of the locked_packages that has torch.")},
)
