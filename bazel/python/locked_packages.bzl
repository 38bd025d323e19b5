"""The distributions of one hash-locked requirements file, as `@<name>//:<distribution>`.

All of them share one site-packages directory, which is a single link in the runfiles of a test. With a directory
for each distribution (rules_python's pip_parse), wheels that load shared libraries of other wheels by relative paths
fail (torch and nvidia-*, nixl), and every test that needs vLLM has 67,000 links. The disadvantage: within one lock
Bazel does not see which distribution a target imports, so it does not detect a missing dependency.

The directory is in the user's cache, under a digest of the lock. So all checkouts share it, and the inputs of a test
are equal in all of them.
"""

load("//bazel:cache.bzl", "CACHE_ENVIRON", "cache_folder", "make_once")

# uv's wheel contains a static binary. pip fetches it from the configured index and checks the hash.
_UV = {
    "linux-amd64": struct(
        requirement = "uv==0.13.8 --hash=sha256:e18a57b8b352eb7c8feb317b9f6f533c8f0ad9673fd6cf34bbe3cf1a9f6a8984",
        wheel = "uv-0.13.8-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
        uv = "uv-0.13.8.data/scripts/uv",
    ),
}

_HEADER = """\
load("@rules_python//python:defs.bzl", "py_library")

package(default_visibility = ["//visibility:public"])

filegroup(
    name = "site_packages",
    srcs = ["site-packages"],
)
"""

_DISTRIBUTION = """
py_library(
    name = "{name}",
    data = [":site_packages"],
    imports = ["site-packages"],
    tags = ["pypi_version={version}"],
)
"""

_DIGEST = """\
import hashlib, pathlib, sys
print(hashlib.sha256(sys.executable.encode() + pathlib.Path(sys.argv[1]).read_bytes()).hexdigest()[:16])
"""

def _locked(text):
    """Yields (name, version) of each `name[extras]==version` line of a requirements file."""
    pins = []
    for line in text.splitlines():
        if not line or line[0] in " #-":
            continue
        requirement = line.split(";")[0].split(" ")[0]
        if "==" not in requirement:
            fail("not a pin: " + line)
        name, version = requirement.split("==")
        pins.append((name.split("[")[0].lower().replace("-", "_").replace(".", "_"), version))
    return pins

def _fetch_uv(rctx, python, uv):
    """Unpacks the pinned uv into uv/. Uses the pip of the base interpreter: the venv in @local_python has none."""
    rctx.file("uv.txt", uv.requirement + "\n")
    result = rctx.execute([
        python,
        "-c",
        "import subprocess, sys; sys.exit(subprocess.call([sys._base_executable, '-m', 'pip'] + sys.argv[1:]))",
        "download",
        "--quiet",
        "--no-deps",
        "--require-hashes",
        "--only-binary=:all:",
        "--dest=wheels",
        "--requirement=uv.txt",
    ])
    if result.return_code:
        fail("pip cannot fetch uv; this Python needs a working pip (on Debian: apt-get install python3-pip):\n" + result.stderr)
    rctx.symlink("wheels/" + uv.wheel, "uv.zip")
    rctx.extract("uv.zip", output = "uv")
    rctx.delete("uv.zip")
    rctx.delete("wheels")

def _locked_packages_impl(rctx):
    platform = rctx.os.name.lower() + "-" + rctx.os.arch
    if platform not in _UV:
        fail("no uv is pinned for " + platform)
    uv = _UV[platform]
    lock = rctx.path(rctx.attr.lock)
    python = rctx.read(Label("@local_python//:path.txt"))
    folder = str(rctx.path("packages"))
    if cache_folder(rctx):
        digest = rctx.execute([python, "-I", "-c", _DIGEST, lock]).stdout.strip()
        folder = "{}/packages/{}-{}".format(cache_folder(rctx), lock.basename.removesuffix("_lock.txt"), digest)
    make_once(rctx, folder, lambda place: _install(rctx, uv, python, lock, place))
    rctx.symlink(folder + "/site-packages", "site-packages")
    build = _HEADER + "".join([
        _DISTRIBUTION.format(name = name, version = version)
        for name, version in _locked(rctx.read(lock))
    ])
    rctx.file("BUILD.bazel", build)

def _install(rctx, uv, python, lock, folder):
    _fetch_uv(rctx, python, uv)
    find_links = []
    for place in rctx.os.environ.get("PIP_FIND_LINKS", "").split(" "):
        if place:
            find_links += ["--find-links", place]
    result = rctx.execute(
        [
            rctx.path("uv/" + uv.uv),
            "pip",
            "install",
            "--no-config",
            "--no-deps",
            "--require-hashes",
            "--only-binary=:all:",
            "--compile-bytecode",
            "--python=" + python,
            "--target=%s/site-packages" % folder,
            "--requirements=" + str(lock),
        ] + find_links,
        timeout = 1800,
        quiet = rctx.attr.quiet,
    )
    rctx.delete("uv")
    if result.return_code:
        rctx.delete(folder)
        fail("cannot install {}; docs/building.md has a section on this:\n{}".format(rctx.attr.lock, result.stderr))

locked_packages = repository_rule(
    implementation = _locked_packages_impl,
    attrs = {
        "lock": attr.label(mandatory = True),
        "quiet": attr.bool(default = True),
    },
    environ = CACHE_ENVIRON + ["PIP_FIND_LINKS"],
)
