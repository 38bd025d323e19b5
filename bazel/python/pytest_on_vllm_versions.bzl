"""One pytest_test for each version of vLLM other than the locked one."""

load("//bazel/python:pytest_test.bzl", "pytest_test")
load("//third_party/python:vllm_versions.bzl", "VLLM_SKIPS", "VLLM_VERSIONS", "vllm_repository")

def pytest_on_vllm_versions(name, deps, **kwargs):
    """Runs pytest modules on the Python files of each of `VLLM_VERSIONS`, in the full run.

    Args:
        name: the targets are `<name>_vllm_<version>_test`.
        deps: dependencies of the test on the locked version.
        **kwargs: forwarded to pytest_test.
    """
    for version in VLLM_VERSIONS:
        site = "@%s//:files" % vllm_repository(version)
        pytest_test(
            name = "%s_%s_test" % (name, vllm_repository(version)),
            args = ["-p", "engine_files"],
            data = [site],
            env = {
                "HYBRIDKV_VLLM_FILES": "$(rootpath %s)" % site,
                "HYBRIDKV_VLLM_SKIPS": " ".join(VLLM_SKIPS[version].keys()),
            },
            tags = ["full"],
            deps = deps + [Label("//tests/support:engine_files")],
            **kwargs
        )
