"""The rules and macros that BUILD files of this monorepo load."""

load("//bazel/gpu:cuda_library.bzl", _cuda_library = "cuda_library")
load("//bazel/gpu:gpu_sentinel.bzl", _gpu_sentinel = "gpu_sentinel")
load("//bazel/gpu:gpu_test.bzl", _gpu_test = "gpu_test")
load("//bazel/python:code_library.bzl", _code_library = "code_library")
load("//bazel/python:library.bzl", _hybridkv_library = "hybridkv_library")
load("//bazel/python:pytest_on_vllm_versions.bzl", _pytest_on_vllm_versions = "pytest_on_vllm_versions")
load("//bazel/python:pytest_test.bzl", _pytest_test = "pytest_test")
load("//bazel/python:wheel.bzl", _installed_library = "installed_library", _release = "release", _sdist = "sdist", _wheel = "wheel", _wheelhouse = "wheelhouse")
load("//tools/lint:sources.bzl", _lint_sources = "lint_sources")

code_library = _code_library
cuda_library = _cuda_library
gpu_sentinel = _gpu_sentinel
gpu_test = _gpu_test
hybridkv_library = _hybridkv_library
installed_library = _installed_library
lint_sources = _lint_sources
pytest_on_vllm_versions = _pytest_on_vllm_versions
pytest_test = _pytest_test
release = _release
sdist = _sdist
wheel = _wheel
wheelhouse = _wheelhouse
