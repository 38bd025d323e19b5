"""Tests that need GPUs."""

load("//bazel/python:pytest_test.bzl", "pytest_test")

def gpu_test(name, srcs, gpus = 1, args = [], env = {}, tags = [], deps = [], target_compatible_with = [], **kwargs):
    """A pytest_test that runs alone on its own GPUs, and is skipped where there are too few.

    Bazel skips it on a machine without the GPUs (`SKIPPED` in its summary) and never reports a pass.
    Within one Bazel server the resource tag keeps tests from sharing a GPU; across servers and
    users the lease in gpu_lease.py does, and it sets CUDA_VISIBLE_DEVICES. It reaches no network. `--config=gpu` makes
    a machine without GPUs an error, and //tests/gpu:sentinel_test says what was skipped.

    Args:
        name: the target's name.
        srcs: pytest modules.
        gpus: how many GPUs: 1, 2, 4 or 8.
        args: further arguments of pytest.
        env: further environment variables.
        tags: further tags.
        deps: what the modules import.
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
