"""C++ sources of nanobind from the locked wheel, as `@nanobind_cc`: for this build's Python and the stable ABI."""

_BUILD = """\
load("@rules_cc//cc:defs.bzl", "cc_library")

package(default_visibility = ["//visibility:public"])

# One library for the Python of this build, and one for the stable ABI of Python 3.12.
[cc_library(
    name = name,
    defines = defines,
    srcs = ["nanobind/src/nb_combined.cpp"],
    hdrs = glob(["nanobind/include/**/*.h"]),
    copts = [
        "-O2",
        "-fno-strict-aliasing",
        "-fvisibility=hidden",
        "-ffunction-sections",
        "-fdata-sections",
        "-DNDEBUG",
        "-w",
    ],
    includes = [
        "nanobind/ext/robin_map/include",
        "nanobind/include",
    ],
    linkstatic = True,
    textual_hdrs = glob(
        [
            "nanobind/ext/robin_map/include/**/*.h",
            "nanobind/src/*.cpp",
            "nanobind/src/*.h",
        ],
        exclude = ["nanobind/src/nb_combined.cpp"],
    ),
    deps = [headers],
) for name, headers, defines in [
    (
        "nanobind",
        "@local_python//:headers",
        [],
    ),
    (
        "nanobind_abi3",
        "@debian_python//:headers",
        ["Py_LIMITED_API=0x030C0000"],
    ),
]]
"""

def _nanobind_cc_impl(rctx):
    root = rctx.path(rctx.attr.packages).dirname.get_child("site-packages").get_child("nanobind")
    if not root.exists:
        fail("%s installs no nanobind" % rctx.attr.packages)
    for folder in ("ext", "include", "src"):
        rctx.symlink(root.get_child(folder), "nanobind/" + folder)
    rctx.file("BUILD.bazel", _BUILD)

nanobind_cc = repository_rule(
    implementation = _nanobind_cc_impl,
    attrs = {"packages": attr.label(mandatory = True, doc = "The BUILD file of the locked_packages that has nanobind.")},
)
