"""The same repositories for Bazel modules."""

load("//bazel:repositories.bzl", "hybridkv_repositories")

hybridkv = module_extension(implementation = lambda _: hybridkv_repositories())
