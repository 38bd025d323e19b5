"""A Python toolchain from an installed interpreter.

The virtual environment is in the user's cache, so its path is equal in all checkouts. The path is part of each Python
action, and Bazel reuses a cached result only for the same path.
"""

load("//bazel:cache.bzl", "CACHE_ENVIRON", "cache_folder", "make_once")

_BUILD = """\
load("@bazel_tools//tools/python:toolchain.bzl", "py_runtime_pair")
load("@rules_cc//cc:defs.bzl", "cc_library")

package(default_visibility = ["//visibility:public"])

py_runtime(
    name = "runtime",
    interpreter_path = "{path}",
    python_version = "PY3",
    stub_shebang = "#!{path}",
)

py_runtime_pair(
    name = "runtime_pair",
    py3_runtime = ":runtime",
)

toolchain(
    name = "toolchain",
    toolchain = ":runtime_pair",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)

# For extension modules.
cc_library(
    name = "headers",
    hdrs = glob(["include/**/*.h"]),
    includes = ["include"],
)
"""

# Only targets that compile an extension fail, with this reason.
_NO_HEADERS = """\
#error "this Python has no headers; hint: apt-get install python3-dev, or set HYBRIDKV_PYTHON to another Python"
"""

_PROBE = """\
import os, sys
if "%d.%d" % sys.version_info[:2] != sys.argv[1]:
    sys.exit("is %d.%d" % sys.version_info[:2])
print(os.path.realpath(sys.executable))
"""

_DIGEST = """\
import hashlib, os, sys
print(hashlib.sha256(repr((os.path.realpath(sys.executable), sys.version)).encode()).hexdigest()[:16])
"""

def _make_venv(rctx, python):
    """Returns the path of a virtual environment's Python. The environment hides the packages of the machine."""
    folder = str(rctx.path("venv"))
    if cache_folder(rctx):
        digest = rctx.execute([python, "-I", "-c", _DIGEST]).stdout.strip()
        folder = "{}/python-{}".format(cache_folder(rctx), digest)
    path = folder + "/bin/python3"

    def make(place):
        result = rctx.execute([python, "-I", "-m", "venv", "--clear", "--without-pip", place])
        if result.return_code:
            fail("{} makes no virtual environment: {}".format(python, (result.stderr or result.stdout).strip()))

    make_once(rctx, folder, make)
    return path

def _candidates(rctx):
    chosen = rctx.os.environ.get("HYBRIDKV_PYTHON", "")
    if chosen:
        return [chosen]
    version = rctx.attr.python_version
    found = [str(p) for p in [rctx.which("python" + version), rctx.which("python3")] if p]
    pyenv = rctx.os.environ.get("PYENV_ROOT", "")
    if pyenv and rctx.path(pyenv + "/versions").exists:
        for entry in rctx.path(pyenv + "/versions").readdir():
            if entry.basename.startswith(version + "."):
                found.append(str(entry.get_child("bin").get_child("python" + version)))
    return found

def _link_headers(rctx, python):
    result = rctx.execute([python, "-I", "-c", "import sysconfig; print(sysconfig.get_path('include'))"])
    include = result.stdout.strip()
    if result.return_code == 0 and rctx.path(include + "/Python.h").exists:
        rctx.symlink(include, "include")
    else:
        rctx.file("include/Python.h", _NO_HEADERS)

def _local_python_impl(rctx):
    tried = []
    for candidate in _candidates(rctx):
        result = rctx.execute([candidate, "-I", "-c", _PROBE, rctx.attr.python_version])
        if result.return_code == 0:
            path = _make_venv(rctx, result.stdout.strip())
            rctx.file("BUILD.bazel", _BUILD.format(path = path))
            rctx.file("path.txt", path)
            _link_headers(rctx, path)
            return
        tried.append("%s (%s)" % (candidate, (result.stderr or result.stdout).strip()))
    fail("no Python {} found; set HYBRIDKV_PYTHON to one. Tried: {}".format(
        rctx.attr.python_version,
        ", ".join(tried) or "nothing",
    ))

local_python = repository_rule(
    implementation = _local_python_impl,
    attrs = {"python_version": attr.string(mandatory = True)},
    environ = CACHE_ENVIRON + ["HYBRIDKV_PYTHON", "PATH", "PYENV_ROOT"],
    local = True,
)
