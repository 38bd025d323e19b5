"""Python files of a version of vLLM other than the locked one, as `@vllm_<version>//:files`.

A wheel of vLLM is a CUDA build of 0.3 GB. The source archive has the same Python files, except those that come
with kernels. Compiled parts are from the locked CPU build: `site/vllm` has links to both.
"""

load("//bazel:cache.bzl", "CACHE_ENVIRON", "cache_folder", "make_once")

_BUILD = """\
package(default_visibility = ["//visibility:public"])

filegroup(
    name = "files",
    srcs = ["site"],
)
"""

_LINK = """\
import pathlib, sys
files, locked, site = map(pathlib.Path, sys.argv[1:4])
(site / "vllm").mkdir(parents=True)
for path in [*files.joinpath("vllm").iterdir(), *locked.joinpath("vllm").glob("*.so")]:
    (site / "vllm" / path.name).symlink_to(path)
for path in files.glob("*.dist-info"):
    (site / path.name).symlink_to(path)
"""

def _vllm_files_impl(rctx):
    python = rctx.read(Label("@local_python//:path.txt"))
    folder = str(rctx.path("files"))
    if cache_folder(rctx):
        folder = "{}/packages/vllm-{}-{}".format(cache_folder(rctx), rctx.attr.version, rctx.attr.sha256[:16])
    script = rctx.path(Label("//bazel/python:unpack_vllm.py"))
    make_once(rctx, folder, lambda place: _unpack(rctx, python, script, place))
    locked = rctx.path(rctx.attr.packages).dirname.get_child("site-packages")
    result = rctx.execute([python, "-I", "-c", _LINK, folder, locked, rctx.path("site")])
    if result.return_code:
        fail(result.stderr)
    rctx.file("BUILD.bazel", _BUILD)

def _unpack(rctx, python, script, folder):
    result = rctx.execute([python, script, rctx.attr.url, rctx.attr.sha256, rctx.attr.version, folder], timeout = 1800)
    if result.return_code:
        rctx.delete(folder)
        fail("cannot fetch vLLM {}: {}".format(rctx.attr.version, result.stderr))

vllm_files = repository_rule(
    implementation = _vllm_files_impl,
    attrs = {
        "packages": attr.label(mandatory = True, doc = "BUILD file of the locked engine"),
        "sha256": attr.string(mandatory = True),
        "url": attr.string(mandatory = True),
        "version": attr.string(mandatory = True),
    },
    environ = CACHE_ENVIRON + ["SSL_CERT_FILE", "https_proxy", "HTTPS_PROXY"],
)
