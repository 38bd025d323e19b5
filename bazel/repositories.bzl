"""Every external repository that this monorepo declares itself, for both WORKSPACE and MODULE.bazel."""

load("//bazel/chromium:debian_chromium.bzl", "debian_chromium")
load("//bazel/gpu:local_cuda.bzl", "local_cuda")
load("//bazel/gpu:local_gpus.bzl", "local_gpus")
load("//bazel/npm:npm_buildifier.bzl", "npm_buildifier")
load("//bazel/prometheus:debian_prometheus.bzl", "debian_prometheus")
load("//bazel/python:debian_python.bzl", "debian_python")
load("//bazel/python:local_python.bzl", "local_python")
load("//bazel/python:locked_packages.bzl", "locked_packages")
load("//bazel/python:nanobind_cc.bzl", "nanobind_cc")
load("//bazel/python:vllm_files.bzl", "vllm_files")
load("//third_party/python:vllm_versions.bzl", "VLLM_VERSIONS", "vllm_repository")

def hybridkv_repositories():
    """Declares the repositories. Each is fetched when a target needs it."""
    local_python(name = "local_python", python_version = "3.11")

    # For extensions that run on Python 3.12 and later.
    debian_python(
        name = "debian_python",
        installer = "//tools:install_python.sh",
        private_apt = "//tools:private_apt.sh",
    )

    # Imports of the libraries; small.
    locked_packages(name = "pypi", lock = "//third_party/python:requirements_lock.txt")
    nanobind_cc(name = "nanobind_cc", packages = "@pypi//:BUILD.bazel")

    # The same packages at the same versions, and torch and vLLM; only for targets that need those.
    locked_packages(name = "pypi_engine", lock = "//third_party/python:engine_lock.txt")

    # Other versions of vLLM for the contract tests and the oracle, 40 MB each, in the full run.
    for version, archive in VLLM_VERSIONS.items():
        vllm_files(
            name = vllm_repository(version),
            packages = "@pypi_engine//:BUILD.bazel",
            sha256 = archive["sha256"],
            url = archive["url"],
            version = version,
        )

    # 230 MB, for the few tests that read memory of a peer with nixl. Needs numpy from one of the other locks.
    locked_packages(name = "pypi_nixl", lock = "//third_party/python:nixl_lock.txt")

    # LMCache's server in two versions. Tests run it as a process; no target imports it.
    locked_packages(name = "pypi_lmcache_0_5_6", lock = "//third_party/python:lmcache_0_5_6_lock.txt")
    locked_packages(name = "pypi_lmcache_0_5_7rc2", lock = "//third_party/python:lmcache_0_5_7rc2_lock.txt")

    # A server of an object store, also run as a process.
    locked_packages(name = "pypi_seaweedfs", lock = "//third_party/python:seaweedfs_lock.txt")

    # For the site of the documentation, and for tests of the examples in deploy/.
    locked_packages(name = "pypi_site", lock = "//third_party/python:site_lock.txt")
    local_cuda(name = "local_cuda")
    local_gpus(name = "local_gpus", engine_lock = "//third_party/python:engine_lock.txt")

    # A monitoring server for tests of the alerts and metrics.
    debian_prometheus(
        name = "debian_prometheus",
        installer = "//tools:install_prometheus.sh",
        private_apt = "//tools:private_apt.sh",
    )

    # A browser for tests of the documentation site.
    debian_chromium(
        name = "debian_chromium",
        installer = "//tools:install_chromium.sh",
        private_apt = "//tools:private_apt.sh",
    )
    npm_buildifier(
        name = "npm_buildifier",
        lock = "//third_party/npm:package-lock.json",
        package = "//third_party/npm:package.json",
    )
