"""buildifier, from the npm package with its binaries; npm checks the hash in the lock."""

_BUILD = """\
package(default_visibility = ["//visibility:public"])

filegroup(
    name = "buildifier",
    srcs = {srcs},
    target_compatible_with = {needs},
)
"""

_BINARIES = {
    "linux-aarch64": "buildifier-linux_arm64",
    "linux-amd64": "buildifier-linux_amd64",
}

def _install(rctx):
    """Returns the path of the binary in this repository, and the reason if there is none."""
    platform = rctx.os.name.lower() + "-" + rctx.os.arch
    npm = rctx.which("npm")
    if not npm:
        return None, "no npm in $PATH"
    if platform not in _BINARIES:
        return None, "no binary is known for " + platform
    rctx.symlink(rctx.attr.package, "package.json")
    rctx.symlink(rctx.attr.lock, "package-lock.json")
    result = rctx.execute([npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], timeout = 300)
    if "EINTEGRITY" in result.stderr:
        fail("the package from npm is not that of package-lock.json:\n" + result.stderr)
    binary = "node_modules/@bazel/buildifier/" + _BINARIES[platform]
    if result.return_code or not rctx.path(binary).exists:
        return None, "npm cannot install it: " + result.stderr.strip()
    return binary, ""

def _npm_buildifier_impl(rctx):
    binary, reason = _install(rctx)
    if binary:
        rctx.file("BUILD.bazel", _BUILD.format(srcs = [binary], needs = []))
    else:
        # buildifier: disable=print
        print("the buildifier test is skipped; " + reason)
        rctx.file("BUILD.bazel", _BUILD.format(srcs = [], needs = ["@platforms//:incompatible"]))

npm_buildifier = repository_rule(
    implementation = _npm_buildifier_impl,
    attrs = {
        "lock": attr.label(allow_single_file = True, mandatory = True),
        "package": attr.label(allow_single_file = True, mandatory = True),
    },
    environ = ["PATH"],
)
