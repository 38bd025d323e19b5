"""Tests whose whole program, the library under test included, is compiled with a sanitizer."""

load("@rules_cc//cc:defs.bzl", "cc_test")

_SANITIZERS = {
    "address": ["-fsanitize=address,undefined"],
    "thread": ["-fsanitize=thread"],
}

def sanitized_tests(name, srcs, library, deps, **kwargs):
    """`<name>_address_test` and `<name>_thread_test`, so that a plain `bazel test //...` runs them.

    `--config=asan`, `ubsan` and `tsan` do the same to any C++ target; these two cost no second build of the rest.

    Args:
        name: the test's name without `_test`.
        srcs: its sources.
        library: the sources of what it tests.
        deps: header-only libraries.
        **kwargs: forwarded to cc_test.
    """
    for sanitizer, options in _SANITIZERS.items():
        cc_test(
            name = "%s_%s_test" % (name, sanitizer),
            srcs = srcs + [library],
            copts = options + ["-O2", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"],
            linkopts = options + ["-lpthread"],
            deps = deps,
            **kwargs
        )
