"""Platform of this machine: the host's, with constraints for its NVIDIA GPUs, its nvcc and the CUDA of its torch."""

_BUILD = """\
package(default_visibility = ["//visibility:public"])

exports_files(["machine.json"])

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

def _why_no_torch(rctx):
    """Reads the lock instead of the installed torch, because only some builds install it."""
    for line in rctx.read(rctx.attr.engine_lock).splitlines():
        if line.startswith("torch=="):
            pin = line.split(" ")[0]
            if not pin.endswith("+cpu"):
                return ""
            return "%s of the lock is built without CUDA; docs/guides/gpu.md says how to run this with another" % pin
    return "the lock has no torch"

def _local_gpus_impl(rctx):
    count, reason = _count(rctx)
    if reason and rctx.os.environ.get("HYBRIDKV_GPUS", "") == "required":
        fail(reason)
    if reason:
        # buildifier: disable=print
        print("GPU tests are skipped; " + reason)
    constraints = ["@hybridkv//bazel/gpu:at_least_%d_nvidia_gpus" % n for n in (1, 2, 4, 8) if n <= count]
    why_not = {
        "//bazel/gpu:working_nvcc": rctx.read(Label("@local_cuda//:why_not.txt")),
        "//bazel/gpu:torch_with_cuda": _why_no_torch(rctx),
    }
    constraints += ["@hybridkv" + label for label, missing in why_not.items() if not missing]
    rctx.file("BUILD.bazel", _BUILD.format(constraints = repr(constraints)))

    # For the sentinel.
    rctx.file("machine.json", json.encode({"gpus": count, "why_no_gpu": reason, "why_not": why_not}))

local_gpus = repository_rule(
    implementation = _local_gpus_impl,
    attrs = {"engine_lock": attr.label(mandatory = True, doc = "The requirements file that names the engine's torch.")},
    environ = ["HYBRIDKV_GPUS", "PATH"],
    local = True,
)
