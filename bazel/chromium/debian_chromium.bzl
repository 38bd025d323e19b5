"""Headless Chromium from PATH, or else from Debian; apt checks the archive's signature."""

_BUILD = """\
package(default_visibility = ["//visibility:public"])

filegroup(
    name = "chromium",
    srcs = {chromium},
    data = glob(["chromium/**", "lib/**", "share/**", "fonts.conf"], allow_empty = True),
    target_compatible_with = {needs},
)
"""

_PROGRAMS = ["chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"]

def _install(rctx):
    """Makes chromium.sh. Returns the reason if that fails, or nothing."""
    for program in _PROGRAMS:
        path = rctx.which(program)
        if path:
            rctx.file("chromium.sh", "#!/bin/sh\nexec %s \"$@\"\n" % path)
            return ""
    rctx.path(rctx.attr.private_apt)  # fetched again when it changes
    result = rctx.execute(["bash", rctx.path(rctx.attr.installer), rctx.path(".")], timeout = 600)
    return result.stderr.strip() if result.return_code else ""

def _debian_chromium_impl(rctx):
    reason = _install(rctx)
    if reason:
        # buildifier: disable=print
        print("the test with a browser is skipped; " + reason)
    rctx.file("BUILD.bazel", _BUILD.format(
        chromium = [] if reason else ["chromium.sh"],
        needs = ["@platforms//:incompatible"] if reason else [],
    ))

debian_chromium = repository_rule(
    implementation = _debian_chromium_impl,
    attrs = {
        "installer": attr.label(allow_single_file = True, mandatory = True),
        "private_apt": attr.label(allow_single_file = True, mandatory = True),
    },
    environ = [
        "PATH",
        "CHROMIUM_DEBIAN_MIRROR",
        "CHROMIUM_DEBIAN_SUITE",
    ],
)
