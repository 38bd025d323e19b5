"""The repositories of repositories.bzl for Bazel modules."""

load("//bazel:repositories.bzl", "hybridkv_repositories")

hybridkv = module_extension(implementation = lambda _: hybridkv_repositories())
