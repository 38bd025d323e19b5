"""prometheus and promtool from PATH, or else from Debian; apt checks the archive's signature."""

_BUILD = """\
package(default_visibility = ["//visibility:public"])

filegroup(
    name = "prometheus",
    srcs = {prometheus},
    target_compatible_with = {needs},
)

filegroup(
    name = "promtool",
    srcs = {promtool},
    target_compatible_with = {needs},
)
"""

_PROGRAMS = ["prometheus", "promtool"]

def _install(rctx):
    """Puts both programs into bin/. Returns the reason if that fails, or nothing."""
    found = {program: rctx.which(program) for program in _PROGRAMS}
    if all(found.values()):
        for program, path in found.items():
            rctx.symlink(path, "bin/" + program)
        return ""
    rctx.path(rctx.attr.private_apt)  # fetched again when it changes
    result = rctx.execute(["bash", rctx.path(rctx.attr.installer), rctx.path(".")], timeout = 300)
    return result.stderr.strip() if result.return_code else ""

def _debian_prometheus_impl(rctx):
    reason = _install(rctx)
    if reason:
        # buildifier: disable=print
        print("tests with a Prometheus server are skipped; " + reason)
    sources = {program: [] if reason else ["bin/" + program] for program in _PROGRAMS}
    rctx.file("BUILD.bazel", _BUILD.format(needs = ["@platforms//:incompatible"] if reason else [], **sources))

debian_prometheus = repository_rule(
    implementation = _debian_prometheus_impl,
    attrs = {
        "installer": attr.label(allow_single_file = True, mandatory = True),
        "private_apt": attr.label(allow_single_file = True, mandatory = True),
    },
    environ = [
        "PATH",
        "PROMETHEUS_DEBIAN_MIRROR",
        "PROMETHEUS_DEBIAN_SUITE",
    ],
)
