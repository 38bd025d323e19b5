"""Tests that need GPUs."""

load("//bazel/python:pytest_test.bzl", "pytest_test")

def gpu_test(name, srcs, gpus = 1, args = [], env = {}, tags = [], deps = [], target_compatible_with = [], **kwargs):
    """A pytest_test on GPUs that no other test uses at the same time. Skipped if there are too few GPUs.

    Bazel skips it on a machine without the GPUs (`SKIPPED` in its summary) and never reports a pass.
    Within one Bazel server a resource tag prevents that tests share a GPU. Across servers and users, the lease in
    gpu_lease.py prevents it, and sets CUDA_VISIBLE_DEVICES. The test has no network. With `--config=gpu` a machine
    without GPUs is an error. //tests/gpu:sentinel_test lists the skipped tests.

    Args:
        name: the target's name.
        srcs: pytest modules.
        gpus: number of GPUs: 1, 2, 4 or 8.
        args: further arguments of pytest.
        env: further environment variables.
        tags: further tags.
        deps: imports of the modules.
        target_compatible_with: further constraints.
        **kwargs: forwarded to pytest_test.
    """
    if gpus not in (1, 2, 4, 8):
        fail("gpus must be 1, 2, 4 or 8, not %s" % gpus)
    pytest_test(
        name = name,
        srcs = srcs,
        args = ["-p", "bazel.gpu.gpu_lease"] + args,
        env = env | {"HYBRIDKV_TEST_GPUS": str(gpus)},
        tags = tags + ["gpu", "requires-gpu-nvidia", "resources:gpu:%d" % gpus, "no-remote-exec", "block-network"],
        target_compatible_with = target_compatible_with + [
            Label("//bazel/gpu:at_least_%d_nvidia_gpus" % gpus),
        ],
        deps = deps + [Label("//bazel/gpu:gpu_lease")],
        **kwargs
    )
