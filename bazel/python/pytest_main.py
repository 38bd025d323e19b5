"""Runs pytest on the source files of this test, with Bazel's conventions for tests."""

import gc
import importlib.util
import os
import pathlib
import runpy
import sys

import pytest


class _Shard:
    """Keeps every nth test, in the order of collection."""

    def __init__(self, index: int, total: int) -> None:
        self.index = index
        self.total = total

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept = items[self.index :: self.total]
        dropped = [item for i, item in enumerate(items) if i % self.total != self.index]
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


class _Collector:
    """Excludes the imports of test modules from garbage collection: vLLM alone creates a million objects."""

    def pytest_sessionstart(self) -> None:
        gc.disable()

    def pytest_collection_finish(self) -> None:
        gc.freeze()
        gc.enable()


class _Ring:
    """Deselects tests marked `full`, except in the full run."""

    def __init__(self, *, is_full: bool) -> None:
        self.is_full = is_full

    def pytest_configure(self, config: pytest.Config) -> None:
        config.addinivalue_line("markers", "full: runs with --config=full alone")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self.is_full:
            return
        dropped = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


def narrow_the_cpu() -> None:
    """Hides AVX-512 from this interpreter and from all interpreters that a test starts."""
    folder = pathlib.Path(__file__).absolute().parent / "without_avx512"
    sys.path.insert(0, str(folder))
    path = [str(folder), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in path if entry)
    runpy.run_path(str(folder / "sitecustomize.py"))


def _profile(*, is_full: bool) -> str:
    """Name of the profile of hypothesis: 100 examples in the full run, else 50, for tests that set no number."""
    from hypothesis import settings

    settings.register_profile("before-landing", settings.get_profile("ci"), max_examples=50)
    return "ci" if is_full else "before-landing"


def _draw_the_same_beside_any_module() -> None:
    """Removes constants of imported modules from the examples. With them, the examples of a test depend on the other
    imported modules."""
    from hypothesis.internal.conjecture import providers

    providers._get_local_constants = providers.Constants


def main() -> int:
    env = os.environ
    if env.get("HYBRIDKV_CPU_LEVEL") == "avx2":
        narrow_the_cpu()
    if not sys.argv[1:]:
        sys.exit("pytest_main: no test modules named; run this through `bazel test` or `bazel run`")
    args = ["-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir=.", "-ra", *sys.argv[1:]]
    if output := env.get("XML_OUTPUT_FILE"):
        args += [f"--junitxml={output}"]
    if only := env.get("TESTBRIDGE_TEST_ONLY"):
        args += ["-k", only]
    if scratch := env.get("TEST_TMPDIR"):
        # hypothesis stores its examples, and the tree is read-only.
        env.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", f"{scratch}/hypothesis")
    if not env.get("HYPOTHESIS_EXPLORE") and importlib.util.find_spec("hypothesis"):
        # The same examples in every run. Otherwise a cached result is about other examples than the next run.
        args.append(f"--hypothesis-profile={_profile(is_full='HYBRIDKV_FULL' in env)}")
        _draw_the_same_beside_any_module()
    plugins: list[object] = [_Collector(), _Ring(is_full="HYBRIDKV_FULL" in env)]
    if total := int(env.get("TEST_TOTAL_SHARDS", "0")):
        pathlib.Path(env["TEST_SHARD_STATUS_FILE"]).touch()
        plugins.append(_Shard(int(env["TEST_SHARD_INDEX"]), total))
    code = pytest.main(args, plugins)
    # With a shard or a filter there may be no test to run; otherwise that is an error.
    if code == pytest.ExitCode.NO_TESTS_COLLECTED and (total or only):
        return 0
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
