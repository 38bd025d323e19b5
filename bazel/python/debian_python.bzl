"""A later Python than that of this build, with headers, from Debian; apt checks the archive's signature."""

_BUILD = """\
load("@rules_cc//cc:defs.bzl", "cc_library")

package(default_visibility = ["//visibility:public"])

# For extension modules of the stable ABI.
cc_library(
    name = "headers",
    hdrs = glob(["usr/include/**"], allow_empty = True),
    includes = [
        "usr/include",
        "usr/include/python3.13",
    ],
    target_compatible_with = {needs},
)

filegroup(
    name = "interpreter",
    srcs = {python},
    data = glob(
        ["usr/bin/**", "usr/lib/**"],
        allow_empty = True,
    ),
    target_compatible_with = {needs},
)
"""

def _debian_python_impl(rctx):
    rctx.path(rctx.attr.private_apt)  # fetched again when it changes
    result = rctx.execute(["bash", rctx.path(rctx.attr.installer), rctx.path(".")], timeout = 300)
    if result.return_code:
        # buildifier: disable=print
        print("no wheel for Python 3.12 and later; " + result.stderr.strip())

    # The message of the script, with its hint, comes after that of apt.
    reason = result.stderr.strip().split("install_python.sh: ")[-1].replace("\n", "; ") if result.return_code else ""
    rctx.file("found.bzl", "FOUND = %s\nREASON = %s\n" % (not result.return_code, repr(reason)))
    rctx.file("BUILD.bazel", _BUILD.format(
        needs = ["@platforms//:incompatible"] if result.return_code else [],
        python = [] if result.return_code else ["python"],
    ))

debian_python = repository_rule(
    implementation = _debian_python_impl,
    attrs = {
        "installer": attr.label(allow_single_file = True, mandatory = True),
        "private_apt": attr.label(allow_single_file = True, mandatory = True),
    },
    environ = [
        "PATH",
        "PYTHON_DEBIAN_MIRROR",
        "PYTHON_DEBIAN_SUITE",
    ],
)
