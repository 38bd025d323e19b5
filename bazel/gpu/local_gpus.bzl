"""The platform that this machine is: the host's, with its NVIDIA GPUs and its nvcc as constraints."""

_BUILD = """\
package(default_visibility = ["//visibility:public"])

exports_files(["gpus.txt"])

platform(
    name = "platform",
    constraint_values = {constraints},
    parents = ["@local_config_platform//:host"],
)
"""

def _count(rctx):
    smi = rctx.which("nvidia-smi")
    if not smi:
        return 0, "no nvidia-smi in $PATH"
    result = rctx.execute([smi, "--list-gpus"])
    lines = [line for line in result.stdout.splitlines() if line.startswith("GPU ")]
    if result.return_code or not lines:
        return 0, "nvidia-smi lists no GPU: " + (result.stdout + result.stderr).strip()
    return len(lines), ""

def _local_gpus_impl(rctx):
    count, reason = _count(rctx)
    if reason and rctx.os.environ.get("HYBRIDKV_GPUS", "") == "required":
        fail(reason)
    if reason:
        # buildifier: disable=print
        print("GPU tests are skipped; " + reason)
    constraints = ["@hybridkv//bazel/gpu:at_least_%d_nvidia_gpus" % n for n in (1, 2, 4, 8) if n <= count]
    if not rctx.read(Label("@local_cuda//:why_not.txt")):
        constraints.append("@hybridkv//bazel/gpu:working_nvcc")
    rctx.file("BUILD.bazel", _BUILD.format(constraints = repr(constraints)))

    # For the sentinel: how many, and why none.
    rctx.file("gpus.txt", "%d\n%s\n" % (count, reason))

local_gpus = repository_rule(
    implementation = _local_gpus_impl,
    environ = ["HYBRIDKV_GPUS", "PATH"],
    local = True,
)
